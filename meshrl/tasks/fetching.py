"""Files from other hosts, by http and https: from hosts that are allowed, within limits of bytes and time."""

import http.client
import socket
import ssl
from collections.abc import Collection, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from threading import Timer
from time import monotonic
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from meshrl.data import MOST_BYTES
from meshrl.errors import DataError, described, shortened

PUBLIC: Final = "*"
"""Stands for all hosts with a public address."""
_SECONDS: Final = 30.0
_REDIRECTS: Final = 5
_MOVED: Final = (301, 302, 303, 307, 308)
_KEPT: Final = "/?%:@!$&'()*+,;="
"""Characters of a path and a query that stay as they are, with letters, digits and -._~."""
_UNICAST: Final = ip_network("2000::/3")
_TUNNELS: Final = (ip_network("2001::/32"), ip_network("2002::/16"))
"""Teredo and 6to4, whose addresses lead to those of IPv4 in them."""


def fetched(url: str, hosts: Collection[str], where: str, seconds: float = _SECONDS) -> bytes:
    """Return the file at a URL, cut after one byte more than MOST_BYTES. No proxy is asked.

    `hosts`: those that may be asked, by name, whatever their address is, and PUBLIC for all others with a public one.
    `seconds`: of all of it. Only a system that is slow to look up a name, which nothing ends, may take longer.
    DataError, which names `where`, for another host, also after a redirect, for an answer other than 200, for one that
    ends early, and for one that is late.
    """
    end, current = monotonic() + seconds, url
    for _ in range(1 + _REDIRECTS):
        try:
            found = _answer(urlsplit(current), hosts, end)
        except DataError as error:
            raise DataError(f"{where}: {shortened(url)}: {error}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: no URL
            late = f", after {seconds:g} seconds" if monotonic() >= end else ""
            raise DataError(f"{where}: {shortened(url)} cannot be fetched: {described(error)}{late}") from error
        if isinstance(found, bytes):
            return found
        current = urljoin(current, found)
    raise DataError(f"{where}: {shortened(url)} is redirected more than {_REDIRECTS} times")


def _answer(url: SplitResult, hosts: Collection[str], end: float) -> bytes | str:
    """Return the file at a URL, or where it moved to. OSError if it is not whole at `end`."""
    host, is_safe = _ascii(url.hostname or ""), url.scheme == "https"
    if url.scheme not in ("http", "https"):
        raise DataError(f"the scheme {url.scheme!r} is not read: use http or https")
    opened = _connected(_addresses(host, url.port or (443 if is_safe else 80), hosts), end)
    if is_safe:
        context = ssl.create_default_context()
        opened = context.wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False)

    def shut() -> None:  # each read has a limit of its own, and many may follow
        with suppress(OSError):
            socket.socket.shutdown(opened, socket.SHUT_RDWR)

    watch = Timer(_left(end), shut)
    watch.daemon = True
    watch.start()
    try:
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()
        connection = http.client.HTTPConnection(host)
        connection.sock = opened
        connection.request("GET", _target(url), headers={"Host": _called(host, url.port), "User-Agent": "meshrl"})
        response = connection.getresponse()
        moved = response.getheader("Location")
        if response.status in _MOVED and moved:
            return moved.encode("latin-1").decode(errors="surrogateescape")  # http.client reads bytes as latin-1
        if response.status != http.HTTPStatus.OK:
            raise DataError(f"{host} answered {response.status} {response.reason}")
        data = response.read(MOST_BYTES + 1)
        if monotonic() >= end:  # what was shut ends like a file whose length the host did not say
            raise TimeoutError("not all of it came")
        if response.length and len(data) <= MOST_BYTES:
            raise http.client.IncompleteRead(data, response.length)
        return data
    finally:
        watch.cancel()
        opened.close()


def _left(end: float) -> float:
    return max(end - monotonic(), 0.001)


def _ascii(host: str) -> str:
    """Return a host's name as it is looked up. UnicodeError, a ValueError, if it is none."""
    return host.encode("idna").decode().lower()


def _called(host: str, port: int | None) -> str:
    named = f"[{host}]" if ":" in host else host
    return named if port is None else f"{named}:{port}"


def _target(url: SplitResult) -> str:
    """Return the path and query of a URL in the characters that a request may have."""
    path, query = (quote(part, _KEPT, errors="surrogateescape") for part in (url.path or "/", url.query))
    return f"{path}?{query}" if query else path


def _connected(addresses: Sequence[tuple[str, int]], end: float) -> socket.socket:
    """Return a connection to the first of a host's addresses that answers. OSError of the last if none does."""
    *others, last = addresses
    for number, address in enumerate(others):
        with suppress(OSError):
            return socket.create_connection(address, _left(end) / (len(addresses) - number))
    return socket.create_connection(last, _left(end))


def _addresses(host: str, port: int, hosts: Collection[str]) -> list[tuple[str, int]]:
    """Return the addresses of a host that may be asked. They are connected to, because a name can change its own."""
    is_named = host in map(_ascii, hosts)
    if not is_named and PUBLIC not in hosts:
        raise DataError(f"images are not fetched from {host}: name it in task.image_hosts, or download the image")
    found = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    allowed = [(each, port) for each in found if is_named or _is_public(each)]
    if not allowed:
        raise DataError(f"{host} has the address {found[0]}, which is not public: name the host in task.image_hosts")
    return allowed


def _is_public(address: str) -> bool:
    """True for an address that any host can reach, and that stands for no other address, such as a private one."""
    found = ip_address(address)
    if not found.is_global or found.is_multicast:
        return False
    return found.version == 4 or (found in _UNICAST and not any(found in each for each in _TUNNELS))
