"""The site in a real browser: pages fit their windows and ask no other host; its search finds pages."""

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

playwright = pytest.importorskip("playwright.async_api", reason="playwright drives the browser")
ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
# Shows each page in a frame, of a phone's and of a laptop's width.
TOO_WIDE = """async pages => {
    const found = []
    const frame = document.createElement("iframe")
    Object.assign(frame.style, {height: "900px", border: "none"})
    document.body.append(frame)
    for (const page of pages) {
        await new Promise(resolve => Object.assign(frame, {onload: resolve, src: `/${page}`}))
        for (const width of [420, 1400]) {
            frame.style.width = `${width}px`
            const {scrollWidth, clientWidth} = frame.contentDocument.documentElement
            if (clientWidth !== width || scrollWidth > width) found.push(`${page} needs ${scrollWidth} of ${width}`)
        }
    }
    return found
}"""
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` makes the environment that builds the site"),
]


@contextmanager
def serving(folder: Path) -> Generator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ours = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"}
    subprocess.run([MKDOCS, "build", "--quiet", "--site-dir", tmp_path], cwd=ROOT, env=os.environ | ours, check=True)
    return tmp_path


async def test_pages_fit_their_windows_ask_this_site_alone_and_are_found(browser: "Browser", folder: Path) -> None:
    pages = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.html"))]
    written = [page for page in pages if "/" not in page]
    made = [page for page in pages if "/" in page]
    assert len(written) > 40
    assert len(made) > 80
    listed = re.findall(r"^- \[.*\]\(([^)#]+)", (folder / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert [page for page in listed if not (folder / page).is_file()] == []
    assert set(written) - set(listed) == {"index.html", "404.html"}, "programs are given each page"
    playwright.expect.set_options(timeout=600_000)  # the test has a limit as a whole
    with serving(folder) as address:
        tab = await browser.new_page(viewport={"width": 1900, "height": 900})
        await see(address, written + made[::8], tab)  # those that are made from code and decisions are alike

        await tab.goto(address)
        await tab.get_by_role("textbox", name="Search").fill("staleness bound")
        found = tab.locator(".md-search-result__item").first
        await playwright.expect(found).to_contain_text("Overlap rollout and training")
        await found.get_by_role("link").first.click()
        await tab.wait_for_url("**/overlap.html*")


async def see(address: str, pages: list[str], tab: "Page") -> None:
    requests, errors = list[str](), list[str]()
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    await tab.goto(f"{address}404.html")
    assert await tab.evaluate(TOO_WIDE, pages) == []
    assert errors == []
    assert len(requests) > len(pages)
    assert [url for url in requests if not url.startswith((address, f"blob:{address}", "data:"))] == []
