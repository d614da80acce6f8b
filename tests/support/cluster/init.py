"""The first process of a host. It sets the host up, and ends all its processes when it ends.

It is run by its path and imports nothing of meshrl. Its standard input is a pipe from the process that made the
cluster. When that process ends, however it ends, this one ends too, and the kernel ends every process of the host.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

_BIND = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount by the system call. The command `mount` would follow a link to a descriptor."""
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def furnish(name: str, boot: str, shared_memory: int, shared: list[str], names: str) -> None:
    """Give the host a name, an identity, shared memory, and a /tmp that shares only `shared` with other hosts."""
    socket.sethostname(name)
    kept = {path: os.open(path, os.O_PATH) for path in shared if Path(path).is_relative_to("/tmp")}  # noqa: S108
    mount("tmpfs", "/dev/shm", "tmpfs", options=f"size={shared_memory}")  # noqa: S108
    mount("tmpfs", "/tmp", "tmpfs")  # noqa: S108
    for path, descriptor in kept.items():
        Path(path).mkdir(parents=True)
        mount(f"/proc/self/fd/{descriptor}", path, flags=_BIND)
        os.close(descriptor)
    texts = {
        "/etc/hosts": names,
        "/etc/resolv.conf": "nameserver 127.0.0.1\n",  # nobody answers there, which is reported at once
        "/proc/sys/kernel/random/boot_id": f"{boot}\n",
    }
    for place, text in texts.items():
        own = Path("/tmp", f".{Path(place).name}")  # noqa: S108
        own.write_text(text, "utf-8")
        mount(str(own), place, flags=_BIND)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    signal.signal(signal.SIGCHLD, _reap)
    told = json.loads(sys.stdin.readline())
    if told is not None:
        furnish(**told)
    os.write(1, b"ready\n")
    os.close(1)
    sys.stdin.read()


if __name__ == "__main__":
    main()
