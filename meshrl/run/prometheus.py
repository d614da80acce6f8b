"""The newest numbers of a run for Prometheus, in its text form, on a port of this machine."""

import re
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from meshrl.errors import ConfigError
from meshrl.observe import metric_info

_HOST: Final = "127.0.0.1"
_KIND: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(run: str, numbers: Mapping[str, float]) -> str:
    """Write numbers in the text form, each with its meaning. `tokens a second of main` has `main` as a label."""
    lines: dict[str, list[str]] = {}
    for name, value in numbers.items():
        base, _, of = name.partition(" of ")
        metric = "meshrl_" + re.sub(r"\W", "_", base, flags=re.ASCII)
        labels = {"run": run, **({"of": of} if of else {})}
        label = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        if metric not in lines:
            known = metric_info(name)
            help_text = " ".join(part for part in (known.meaning, f"Unit: {known.unit}." if known.unit else "") if part)
            lines[metric] = [f"# HELP {metric} {_escaped(help_text or name)}", f"# TYPE {metric} gauge"]
        sample = f"{metric}{{{label}}} "
        if not any(line.startswith(sample) for line in lines[metric]):
            lines[metric].append(f"{sample}{float(value)!r}")
    return "".join(f"{line}\n" for each in lines.values() for line in each)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class MetricsServer:
    """Serves `/metrics` on 127.0.0.1 from a thread. It takes the port at once.

    Requests must name 127.0.0.1 or localhost, at any port, because the port may be forwarded.
    """

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        """`port`: 0 for any. `text` is called for each request. Raises ConfigError if the port is taken."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hosts = [host.rpartition(":")[0] or host for host in self.headers.get_all("Host", [])]
                if hosts not in ([_HOST], ["localhost"]):  # a page of another site whose name resolves here
                    return self._answer(421, f"these numbers are at http://{_HOST} alone\n")
                if self.path.partition("?")[0] != "/metrics":
                    return self._answer(404, "the numbers are at /metrics\n")
                return self._answer(200, text())

            def _answer(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", _KIND)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
                """Say nothing of requests."""

        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"run.metrics_port = {port}: {error}: choose another port") from error
        self.port: int = self._server.server_address[1]
        self._server.daemon_threads = True
        self._thread: Thread | None = None

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread = Thread(target=self._server.serve_forever, name="meshrl-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        if self._thread:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
