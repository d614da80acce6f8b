"""The network interface with a given address, on which gloo is to listen."""

import fcntl
import socket
import struct
import sys
from typing import Final

_SIOCGIFADDR: Final = 0x8915
_NAME: Final = 15
"""Most characters of an interface's name."""


def interface_of(ip: str) -> str | None:
    """Return the interface with this IPv4 address. None if there is none, or the system does not say."""
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
