"""Files from other hosts, by http and https: from hosts that are allowed, within limits of bytes and time."""

import http.client
import socket
import ssl
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from threading import Timer
from time import monotonic
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from meshrl.data import MOST_BYTES
from meshrl.errors import DataError, described, shortened

PUBLIC: Final = "*"
"""Stands for all hosts with a public address."""
_SECONDS: Final = 30.0
_REDIRECTS: Final = 5
_MOVED: Final = (301, 302, 303, 307, 308)


def fetched(url: str, hosts: Collection[str], where: str, seconds: float = _SECONDS) -> bytes:
    """Return the file at a URL, cut after one byte more than MOST_BYTES. No proxy is asked.

    `hosts`: those that may be asked, by name, whatever their address is, and PUBLIC for all others with a public one.
    DataError, which names `where`, for another host, also after a redirect, for an answer other than 200, for one that
    ends early, and if all of it takes longer than this.
    """
    end, asked = monotonic() + seconds, url
    for _ in range(1 + _REDIRECTS):
        try:
            found = _answer(urlsplit(asked), hosts, end)
        except DataError as error:
            raise DataError(f"{where}: {shortened(url)}: {error}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: no URL
            late = f", after {seconds:g} seconds" if monotonic() >= end else ""
            raise DataError(f"{where}: {shortened(url)} cannot be fetched: {described(error)}{late}") from error
        if isinstance(found, bytes):
            return found
        asked = urljoin(asked, found)
    raise DataError(f"{where}: {shortened(url)} is redirected more than {_REDIRECTS} times")


def _answer(url: SplitResult, hosts: Collection[str], end: float) -> bytes | str:
    """Return the file at a URL, or where it moved to. OSError if it is not whole at `end`."""
    host, is_safe = url.hostname or "", url.scheme == "https"
    if url.scheme not in ("http", "https"):
        raise DataError(f"the scheme {url.scheme!r} is not read: use http or https")
    address = _address(host, url.port or (443 if is_safe else 80), hosts)
    seconds = max(end - monotonic(), 0.001)
    opened = socket.create_connection(address, seconds)
    if is_safe:
        context = ssl.create_default_context()
        opened = context.wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False)

    def shut() -> None:  # each read has a limit of its own, and many may follow
        with suppress(OSError):
            socket.socket.shutdown(opened, socket.SHUT_RDWR)

    watch = Timer(seconds, shut)
    watch.daemon = True
    watch.start()
    try:
        if isinstance(opened, ssl.SSLSocket):
            opened.do_handshake()
        connection = http.client.HTTPConnection(host)
        connection.sock = opened
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"Host": url.netloc.rpartition("@")[2], "User-Agent": "meshrl"})
        response = connection.getresponse()
        moved = response.getheader("Location")
        if response.status in _MOVED and moved:
            return moved
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


def _address(host: str, port: int, hosts: Collection[str]) -> tuple[str, int]:
    """Return the address of a host that may be asked. It is connected to as it is, because a name can change its."""
    if host not in hosts and PUBLIC not in hosts:
        raise DataError(f"images are not fetched from {host}: name it in task.image_hosts, or download the image")
    found = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    allowed = [each for each in found if host in hosts or ip_address(each).is_global]
    if not allowed:
        raise DataError(f"{host} has the address {found[0]}, which is not public: name the host in task.image_hosts")
    return allowed[0], port
