from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshrl import observe
from meshrl.observe import NOW, live
from tests.observe.files import append, events, metrics

if TYPE_CHECKING:
    from playwright.async_api import Browser

playwright = pytest.importorskip("playwright.async_api", reason="playwright drives the browser")
httpx = pytest.importorskip("httpx", reason="it asks for the page like a browser")
expect = playwright.expect
expect.set_options(timeout=600_000)  # each test has a limit as a whole
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("browser")]
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
HOSTILE = "</script><img src=x onerror=window.hit=1><b onmouseover='window.hit=1'>&amp;"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.toml").write_text(f"ahead = 2\n[run]\nname = '{HOSTILE.replace(chr(39), '')}'\n", "utf-8")
    append(folder / "metrics.jsonl", *metrics(2, first=1))
    append(folder / "samples.jsonl", {"step": 0, "prompt": HOSTILE, "completion": "ok", "reward": 1.0})
    append(folder / "events.jsonl", *events(2, first=1))
    waits = [{"who": "trainer", "what": "a batch", "on": f"3 of 64 groups {HOSTILE}", "seconds": 1.5}]
    calls = [{"where": "Sampler.generate", "ranks": "rank 0 (process 7 on here)", "seconds": 2.5}]
    append(folder / NOW, {"at": 4.0, "waits": waits, "calls": calls})
    monkeypatch.setattr(live, "SILENT", 1e9)  # it lives on, however long the test takes
    return folder


async def test_the_page_shows_what_comes_and_asks_this_machine_alone(run: Path, browser: "Browser") -> None:
    page = await browser.new_page()
    requests, errors = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    async with observe.Watcher(run).serving() as watcher:
        await page.goto(watcher.address)
        await expect(page.locator("header")).to_contain_text("0.125 → 0.25")
        await expect(page.locator(".pill")).to_have_text("running")
        await expect(page.locator(".now")).to_contain_text("steps a minute60")
        await expect(page.locator(".now")).to_contain_text("tokens a second30")
        await expect(page.locator(".now")).to_contain_text("staleness1.5publications behind, at most 2 (ahead)")
        await expect(page.locator(".now")).to_contain_text(f"trainer waits for a batch 1.5 s3 of 64 groups {HOSTILE}")
        await expect(page.locator(".now")).to_contain_text("Sampler.generate 2.5 srank 0 (process 7 on here)")
        await expect(page.locator(".said p").first).to_have_text(HOSTILE)
        await expect(page.locator("pre")).to_contain_text("onerror=window.hit=1")

        append(run / "metrics.jsonl", *metrics(1, first=3))
        append(run / "events.jsonl", *events(1, first=3))
        append(run / "samples.jsonl", {"step": 2, "prompt": "newer", "completion": "ok", "reward": 0.0})
        await expect(page.locator("header")).to_contain_text("0.125 → 0.375")
        await expect(page.locator("h3", has_text="reward")).to_contain_text("0.375")
        await expect(page.locator(".rows [role=option]")).to_have_count(2)
        await expect(page.locator(".rows [role=option]").first).to_contain_text("newer → ok")
        await expect(page.locator(".said p").first).to_have_text(HOSTILE)  # what was open stays open
        assert await page.evaluate("data.steps.length") == 3
        assert await page.evaluate("data.lanes.map(({ began }) => began)") == [[2.5, 3.5, 4.5], [2, 3, 4]]
        assert await page.evaluate("data.curves[0].y") == [0.125, 0.25, 0.375]

        (run / NOW).unlink()
        (run / "summary.json").write_text('{"status": "finished", "steps": 3, "wall_s": 9.0}', "utf-8")
        await expect(page.locator(".pill")).to_have_text("finished")
        await expect(page.locator(".now")).to_have_count(0)
    assert await page.evaluate("window.hit") is None
    assert errors == []
    assert len([url for url in requests if url.endswith("/events")]) == 1, "what is new is sent, not asked for"
    assert [url for url in requests if not url.startswith((f"http://127.0.0.1:{watcher.port}/", "data:"))] == []


async def test_what_was_chosen_stays_and_the_page_is_as_wide_as_its_window(run: Path, browser: "Browser") -> None:
    append(run / "metrics.jsonl", *metrics(28, first=3))
    append(run / "events.jsonl", *events(28, first=3))
    append(run / "samples.jsonl", {"step": 20, "prompt": "newer", "completion": "ok", "reward": 0.0})
    page = await browser.new_page()
    async with observe.Watcher(run).serving() as watcher:
        await page.goto(watcher.address)
        await expect(page.locator(".row-head h3")).to_have_text("step 20")
        await page.locator("summary").focus()
        await page.keyboard.press("Enter")
        await page.locator(".rows").focus()
        await page.keyboard.press("ArrowDown")
        await expect(page.locator(".row-head h3")).to_have_text("step 0")
        append(run / "samples.jsonl", {"step": 40, "prompt": "newest", "completion": "ok", "reward": 0.0})
        append(run / "metrics.jsonl", *metrics(1, first=32))
        await expect(page.locator("header")).to_contain_text("0.125 → 4")
        await expect(page.locator(".count")).to_have_text("3 of 3 rows")
        await expect(page.locator(".row-head h3")).to_have_text("step 0")
        await expect(page.locator(".rows")).to_be_focused()
        await expect(page.locator("details")).to_have_attribute("open", "")

        append(run / "samples.jsonl", {"step": 41, "prompt": "long" * 99, "completion": "long" * 99, "reward": 1.0})
        await expect(page.locator(".count")).to_have_text("4 of 4 rows")
        await page.keyboard.press("Home")
        await expect(page.locator(".said p").first).to_have_text("long" * 99)
        for width in (1400, 420):
            await page.set_viewport_size({"width": width, "height": 900})
            await page.wait_for_function(f"innerWidth === {width} && {FITS}")


async def test_a_page_without_the_token_has_no_buttons_and_one_with_it_asks(run: Path, browser: "Browser") -> None:
    page = await browser.new_page()
    async with observe.Watcher(run, control=True).serving() as watcher:
        await page.goto(watcher.address.partition("#")[0])
        await expect(page.locator(".pill")).to_have_text("running")
        await expect(page.locator(".control")).to_have_count(0)
        await page.goto("about:blank")
        await page.goto(watcher.address)
        assert page.url == watcher.address.partition("#")[0]
        await expect(page.get_by_role("button", name="Checkpoint now")).to_be_disabled()
        await page.get_by_role("button", name="Pause").press("Enter")
        await expect(page.get_by_role("button", name="Resume")).to_be_visible()
        assert (run / "control" / "pause").is_file()
        await page.get_by_role("button", name="Resume").click()
        await expect(page.get_by_role("button", name="Pause")).to_be_visible()
        page.on("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".control")).to_contain_text("stop: asked for.")
        assert (run / "control" / "stop").is_file()
        watcher.token = "another"  # as of a server that was started again
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator(".control")).to_contain_text("a command needs the token")
        await expect(page.locator(".control button")).to_have_count(0)
        watcher.token = "third"
        await page.goto("about:blank")
        await page.goto(watcher.address)
        watcher.token = None  # as of a server that was started again without --control
        await page.get_by_role("button", name="Resume").or_(page.get_by_role("button", name="Pause")).click()
        await expect(page.locator(".control")).to_contain_text("this page is read-only")
        await expect(page.locator(".control button")).to_have_count(0)


async def test_a_page_that_is_one_too_many_says_what_to_do(run: Path, browser: "Browser") -> None:
    first, last = await browser.new_page(), await browser.new_page()
    async with AsyncExitStack() as others, observe.Watcher(run).serving() as watcher:
        client = await others.enter_async_context(httpx.AsyncClient(timeout=600))
        await first.goto(watcher.address)
        await expect(first.locator(".pill")).to_have_text("running")
        while True:
            answer = await others.enter_async_context(client.stream("GET", f"{watcher.address}events"))
            if answer.status_code != 200:
                break
        await last.goto(watcher.address)
        await expect(last.locator(".link")).to_contain_text("close one, then reload this page")
        await expect(first.locator(".link")).to_be_hidden()
        await others.aclose()
