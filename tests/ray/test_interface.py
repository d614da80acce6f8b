"""How gloo is told where to listen. That it has to be is shown in tests/cluster."""

import socket
import sys

import pytest

from meshrl.engines.ray.interface import interface_of


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems are not asked")
def test_an_address_has_an_interface() -> None:
    name = interface_of("127.0.0.1")
    assert name in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None, "an address of no machine"
