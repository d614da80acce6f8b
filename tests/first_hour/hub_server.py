"""A stand-in for the Hugging Face hub: it speaks the part of its HTTP that huggingface_hub asks for."""

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Files = dict[str, bytes]


def ask(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does before the libraries are imported, and HF_HUB_OFFLINE=0."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", url)


@dataclass
class Hub:
    """What lies on it: files by kind and name, `models/ORG/NAME`, and what was asked."""

    repositories: dict[str, Files] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, name: str) -> str:
        files = self.repositories[name]
        return hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name there
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"POST {path}")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            self.hub.repositories.setdefault(f"models/{name}", {})
            self.hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self._json({"files": [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in files]})
        elif "/commit/" in path:
            name = path.removeprefix("/api/").partition("/commit/")[0]
            for line in body.splitlines():
                each = json.loads(line)
                if each["key"] == "file":
                    self.hub.repositories[name][each["value"]["path"]] = base64.b64decode(each["value"]["content"])
            commit = self.hub.commit(name)
            page = f"{self.hub.url}/{name.partition('/')[2]}/commit/{commit}"
            self._json({"commitOid": commit, "commitUrl": page, "success": True})
        else:
            self._refuse(404, "EntryNotFound")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if path.startswith("/api/"):
            return self._api(path.removeprefix("/api/"))
        name, _, inside = path.lstrip("/").partition("/resolve/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        revision, _, file = inside.partition("/")
        if refusal := self._refusal(name, revision):
            return self._refuse(*refusal)
        content = self.hub.repositories[name].get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        etag = hashlib.sha256(content).hexdigest()
        return self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit(name)})

    do_HEAD = do_GET  # noqa: N815 -- its name there

    def _api(self, path: str) -> None:
        name, _, revision = path.replace("/tree/", "/revision/").partition("/revision/")
        revision = revision.partition("/")[0] or "main"
        if refusal := self._refusal(name, revision):
            return self._refuse(*refusal)
        files = self.hub.repositories[name]
        if "/tree/" in path:
            listed = files.items()
            return self._json([{"type": "file", "path": each, "size": len(file), "oid": each} for each, file in listed])
        siblings = [{"rfilename": each} for each in files]
        own = {"id": name.partition("/")[2], "sha": self.hub.commit(name), "siblings": siblings, "private": False}
        return self._json({**own, "tags": [], "downloads": 0, "likes": 0})

    def _refusal(self, name: str, revision: str) -> tuple[int, str] | None:
        if name not in self.hub.repositories:
            return 401, "RepoNotFound"
        if name.partition("/")[2] in self.hub.gated:
            return 403, "GatedRepo"
        return None if revision in ("main", self.hub.commit(name)) else (404, "RevisionNotFound")

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve(server: ThreadingHTTPServer) -> Generator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving() -> Generator[Hub]:
    hub = Hub()
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))) as hub.url:
        yield hub
