"""The server of a run's page: what it sends of a run that goes on, whom it answers, and what it lets be asked."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias, cast

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl.errors import ConfigError
from meshrl.run import NOW, Now
from meshrl.watch import Watcher, live, run_to_watch
from meshrl.watch.live import Live

Message: TypeAlias = tuple[str, dict[str, object]]


def append(file: Path, *lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


@asynccontextmanager
async def looking(watcher: Watcher) -> AsyncGenerator[AsyncIterator[Message]]:
    """The messages to one browser."""
    async with (
        httpx.AsyncClient(timeout=None) as client,  # noqa: S113 -- the test has a limit
        client.stream("GET", f"http://127.0.0.1:{watcher.port}/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _messages(response)


async def _messages(response: httpx.Response) -> AsyncIterator[Message]:
    name = ""
    async for line in response.aiter_lines():
        kind, _, text = line.partition(": ")
        if kind == "event":
            name = text
        elif kind == "data":
            yield name, json.loads(text)


async def first(messages: AsyncIterator[Message], holds: Callable[[Message], bool]) -> Message:
    """The first message that is meant."""
    async for message in messages:
        if holds(message):
            return message
    raise AssertionError("the stream has ended")


def has_curves(message: Message) -> bool:
    return "curves" in message[1]


async def test_a_browser_is_sent_the_whole_and_then_what_is_new(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    async with Watcher(run).serving() as watcher, looking(watcher) as messages:
        name, whole = await anext(messages)
        assert (name, whole["status"], whole["curves"]) == ("whole", "not begun", [])
        append(run / "metrics.jsonl", {"step": 0, "seconds": 1.0, "reward": 0.25})
        name, patch = await first(messages, has_curves)
        (reward,) = cast("list[list[dict[str, object]]]", patch["curves"])[0]
        assert (name, reward["x"], reward["y"]) == ("patch", [0.0], [0.25])
        append(run / "metrics.jsonl", {"step": 1, "seconds": 2.0, "reward": 0.5})
        _, patch = await first(messages, has_curves)
        assert patch["curves"] == {"0": {"x": [0, 1, [1.0]], "y": [0, 1, [0.5]]}}
        assert "config" not in patch
        async with looking(watcher) as late:  # who comes later has it all at once
            _, whole = await anext(late)
            (reward,) = cast("list[dict[str, object]]", whole["curves"])
            assert reward["y"] == [0.25, 0.5]
            append(run / "metrics.jsonl", {"step": 2, "seconds": 3.0, "reward": 1.0})
            for each in (messages, late):
                _, patch = await first(each, has_curves)
                assert patch["curves"] == {"0": {"x": [0, 2, [2.0]], "y": [0, 2, [1.0]]}}


async def sent(page: AsyncIterator[bytes], part: bytes) -> bytes:
    """The first message to a page with a text in it."""
    async for message in page:
        if part in message:
            return message
    raise AssertionError("the stream has ended")


async def test_pages_that_open_together_miss_nothing_and_who_is_far_behind_is_sent_the_whole(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    append(run / "metrics.jsonl", {"step": 0, "reward": 0.125})
    watcher = Watcher(run)
    quick, slow = watcher.events(), watcher.events()
    for whole in await asyncio.gather(anext(quick), anext(slow)):
        assert whole.startswith(b"event: whole")
        assert b"0.125" in whole
    append(run / "metrics.jsonl", {"step": 1, "reward": 0.25})
    for page in (quick, slow):
        assert (await sent(page, b"0.25")).startswith(b"event: patch")
    for step in range(2, 30):
        append(run / "metrics.jsonl", {"step": step, "reward": step + 0.5})
        await sent(quick, f"{step + 0.5}".encode())
    whole = await anext(slow)
    assert whole.startswith(b"event: whole")
    assert b"29.5" in whole
    append(run / "metrics.jsonl", {"step": 30, "reward": 0.75})
    assert (await sent(slow, b"0.75")).startswith(b"event: patch")
    await quick.aclose()
    await slow.aclose()


async def test_a_look_that_fails_is_told_on_the_page_and_followed_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "mine"
    append(run / "metrics.jsonl", {"step": 0, "reward": 0.125})
    watcher = Watcher(run)
    fails = [True]

    def look(of: Live) -> tuple[bool, bool]:
        if fails[0]:
            raise KeyError("no such thing")
        return True, False

    monkeypatch.setattr(Live, "look", look)
    with capture_logs() as told:
        page = watcher.events()
        note = b"The page stands still, as the files in %b cannot be shown: KeyError" % str(run).encode()
        assert note in await anext(page)
        fails[0] = False
        assert b'"notes":[[' in (good := await anext(page))
        assert note not in good
        fails[0] = True
        assert note in await anext(page)
    await page.aclose()
    assert [each["log_level"] for each in told] == ["warning"] * 2


async def test_the_page_brings_all_that_it_needs_and_may_ask_nobody_else(tmp_path: Path) -> None:
    async with Watcher(tmp_path / "mine").serving() as watcher, httpx.AsyncClient(base_url=watcher.address) as client:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "connect-src 'self'" in policy
        for path in ("/style.css", "/script.js"):
            assert path in page.text
            assert (await client.get(path)).status_code == 200
        assert "http" not in page.text
        assert (await client.get("/metrics.jsonl")).status_code == 404


async def test_a_request_that_names_another_host_or_comes_from_another_site_is_refused(tmp_path: Path) -> None:
    async with Watcher(tmp_path, control=True).serving() as watcher, httpx.AsyncClient() as client:
        here = f"http://127.0.0.1:{watcher.port}"
        for host in ("evil.example", f"evil.example:{watcher.port}", "127.0.0.1", "127.0.0.1:1"):
            headers = {"host": host, "authorization": f"Bearer {watcher.token}"}
            for method, path in (("GET", "/"), ("GET", "/events"), ("POST", "/control")):
                assert (await client.request(method, f"{here}{path}", headers=headers)).status_code == 421
        assert (await client.get(f"{here}/", headers={"host": f"localhost:{watcher.port}"})).status_code == 200
        assert (await client.get(f"{here}/events", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403


async def test_it_listens_on_this_machine_alone_and_says_which_port_is_taken(tmp_path: Path) -> None:
    async with Watcher(tmp_path).serving() as watcher, AsyncExitStack() as another:
        assert watcher.address == f"http://127.0.0.1:{watcher.port}/"
        with pytest.raises(ConfigError, match=rf"port {watcher.port} of 127\.0\.0\.1: .*--port"):
            await another.enter_async_context(Watcher(tmp_path).serving(watcher.port))


# --- what may be asked -------------------------------------------------------------------------------


async def test_who_has_the_token_alone_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SILENT", 1e9)  # it lives on, however long the test takes
    run = tmp_path / "mine"
    async with Watcher(run, control=True).serving() as watcher, httpx.AsyncClient() as client:

        async def post(command: str, token: str | None = watcher.token) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            address = f"http://127.0.0.1:{watcher.port}/control"
            return (await client.post(address, content=command, headers=headers)).status_code

        assert await post("pause") == 409  # there is no run yet
        append(run / NOW, msgspec.to_builtins(Now(3.0, [], [])))
        assert [await post("pause", token) for token in (None, "guess")] == [401] * 2
        assert [await post(command) for command in ("rm", "../stop", "x" * 10_000)] == [400, 400, 413]
        assert not (run / "control").exists()
        assert [await post(command) for command in ("pause", "checkpoint")] == [200, 200]
        assert {path.name for path in (run / "control").iterdir()} == {"pause", "checkpoint"}
        Watcher(run, control=True).ask("resume")  # nobody looks at what this one serves
        assert await post("stop") == 200
        assert {path.name for path in (run / "control").iterdir()} == {"stop", "checkpoint"}

    async with Watcher(run).serving() as watcher, httpx.AsyncClient(base_url=watcher.address) as client:
        answer = await client.post("/control", content="stop", headers={"Authorization": "Bearer None"})
    assert (answer.status_code, watcher.token) == (403, None)
    assert "--control" in answer.text


# --- which run ---------------------------------------------------------------------------------------


def test_which_run_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name the run that will start"):
        run_to_watch(None)
    append(Path("runs/one/metrics.jsonl"), {})
    append(Path("runs/two/metrics.jsonl"), {})
    os.utime("runs/two/metrics.jsonl", (1, 1))
    assert run_to_watch(None) == (Path("runs/one"), "the newest run is runs/one")
    assert run_to_watch("two") == (Path("runs/two"), "")
    folder, told = run_to_watch("tow")
    assert folder == Path("runs/tow")
    assert "did you mean two?" in told
    assert "waiting for runs/tow to start" in told
    append(Path("two/metrics.jsonl"), {})
    with pytest.raises(ConfigError, match="write the path of one"):
        run_to_watch("two")
