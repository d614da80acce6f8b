"""The network interface with a given address, to tell gloo where to listen."""

import fcntl
import socket
import struct
import sys
from typing import Final

_SIOCGIFADDR: Final = 0x8915
_NAME: Final = 15
"""Letters of an interface's name."""


def interface_of(ip: str) -> str | None:
    """The interface with this IPv4 address; None where there is none, or where the system cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:_NAME]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(told[20:24]) == ip:
                return name
    return None
