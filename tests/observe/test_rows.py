"""The rows of a run in a browser: the list, its filters, the group of a row, and its tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshrl import observe
from meshrl.observe import compare, read_run, render, render_comparison
from tests.observe.files import append, metrics

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

playwright = pytest.importorskip("playwright.async_api", reason="playwright drives the browser")
expect = playwright.expect
expect.set_options(timeout=600_000)  # each test has a limit as a whole
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("browser")]

WORDS = ["Why", " is", " it", "?", "\n", "Be", "cause", " of", " 你", "", "🙂", "</script>", ".", " Yes"]
DRAWN = [0] * 5 + [1] * 4 + [0] * 3 + [1] * 2
"""Two turns of the model, after a prompt and after an environment."""


def row(step: int, group: int, number: int, **other: object) -> dict[str, object]:
    """A line of samples.jsonl, whose numbers are all different."""
    count, base = len(WORDS), step + group / 10 + number / 100
    sampler = [-(base + at) / 10 if drawn else 0 for at, drawn in enumerate(DRAWN)]
    return {
        "step": step,
        "prompt": f"Why is it? {group}",
        "completion": f"Because of {step}-{group}-{number}",
        "answer": "42",
        "reward": number / 4,
        "reward_right": number / 8,
        "group": group,
        "staleness": 0,
        "truncated": False,
        "reward_error": None,
        "length": count,
        "advantage": number / 4 - 0.375,
        "tokens": {
            "texts": WORDS,
            "tokens": list(range(100, 100 + count)),
            "loss_mask": DRAWN,
            "sampler_logprobs": sampler,
            "logprobs": [value + at / 1000 for at, value in enumerate(sampler)],
            "advantages": [number / 4 - 0.375 if drawn else 0 for drawn in DRAWN],
            "versions": [step + at // 9 if drawn else -1 for at, drawn in enumerate(DRAWN)],
        },
        **other,
    }


def write(folder: Path) -> list[dict[str, Any]]:
    rows = [row(step, group, number) for step in (0, 20) for group in (step, step + 1) for number in range(4)]
    rows[1] |= {"truncated": True}
    rows[2] |= {"reward": None, "reward_error": "ValueError: no number in it"}
    rows[3] |= {"staleness": 2}
    rows[4] |= {"held_out": True}
    append(folder / "samples.jsonl", {"step": 0, "prompt": "of an older run", "completion": "ok", "reward": 0.5}, *rows)
    append(folder / "metrics.jsonl", *metrics(21))
    (folder / "config.toml").write_text('algorithm = "grpo"\n[task]\nsource = "some"\n', "utf-8")
    return rows


async def static(browser: "Browser", file: Path, page: str) -> "Page":
    file.write_text(page, "utf-8")
    shown = await browser.new_page(viewport={"width": 1400, "height": 1000})
    shown.on("pageerror", lambda error: pytest.fail(str(error)))
    await shown.goto(file.as_uri())
    return shown


async def facts(told: "Locator") -> dict[str, str]:
    names, values = await told.locator("dt").all_inner_texts(), await told.locator("dd").all_inner_texts()
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def numbers_of(line: dict[str, Any], at: int) -> dict[str, float]:
    """What the page has to say of a token, by hand."""
    tokens = line["tokens"]
    if not DRAWN[at]:
        return {"id": tokens["tokens"][at], "learned": 0}
    difference = tokens["logprobs"][at] - tokens["sampler_logprobs"][at]
    return {
        "id": tokens["tokens"][at],
        "log-prob, sampler": tokens["sampler_logprobs"][at],
        "log-prob, trainer": tokens["logprobs"][at],
        "trainer \u2212 sampler": difference,
        "advantage": tokens["advantages"][at],
        "version": tokens["versions"][at],
        "versions behind": max(tokens["versions"]) - tokens["versions"][at],
        "learned": 1,
    }


async def test_values_on_the_page_are_those_of_the_file_by_pointer_and_by_key(
    tmp_path: Path, browser: "Browser"
) -> None:
    rows = write(tmp_path / "mine")
    page = await static(browser, tmp_path / "page.html", render(read_run(tmp_path / "mine")))
    await expect(page.locator(".count")).to_have_text("17 of 17 rows")
    newest = next(line for line in rows if line["step"] == 20)
    await expect(page.locator(".row-head h3")).to_have_text("step 20 · group 20 · row 1 of 4")
    said, judged, others = [await facts(each) for each in await page.locator(".row-head dl").all()]
    assert said == {"completion": newest["completion"], "answer": "42"}
    assert judged == {"reward": "0", "reward right": "0"}
    assert others == {"advantage": "-0.375", "tokens": "14", "staleness": "0", "truncated": "no"}
    beside = page.locator(".beside button")
    assert [(await each.inner_text()).split("\n")[0] for each in await beside.all()] == [
        f"reward {reward}" for reward in ("0", "0.25", "0.5", "0.75")
    ]
    box, told = page.locator(".tokens"), page.locator(".told")
    assert await box.locator(".turn").all_inner_texts() == [
        "prompt · 5 tokens",
        "model · 4 tokens",
        "environment · 3 tokens",
        "model · 2 tokens",
    ]
    text = "".join(await box.locator("span").all_text_contents())
    assert text == "".join(WORDS).replace("\n", "\u21b5"), "each character once"
    await box.focus()
    for at in range(len(WORDS)):
        await page.keyboard.press("ArrowRight")
        await expect(told.locator(".title")).to_contain_text(f"token {at + 1} of 14")
        found = {name: float(value.split()[0]) for name, value in (await facts(told)).items()}
        assert found == pytest.approx(numbers_of(newest, at), rel=1e-3), at
    await page.keyboard.press("Home")
    await page.keyboard.press("ArrowDown")
    await expect(told.locator(".title")).to_contain_text("token 6 of 14")  # the next line of tokens begins there
    await page.keyboard.press("End")
    await expect(told.locator(".title")).to_have_text('" Yes", token 14 of 14')

    await box.locator("[data-at='7']").hover()
    await expect(page.locator("#tip b")).to_have_text('" of", token 8 of 14')
    await expect(page.locator("#tip")).to_contain_text(f"log-prob, sampler  {newest['tokens']['sampler_logprobs'][7]}")
    await page.locator("select[aria-label='colour of tokens']").select_option("advantages")
    coloured = "[...document.querySelectorAll('.tokens span[style]')].map((each) => Number(each.dataset.at))"
    assert await page.evaluate(coloured) == [at for at, drawn in enumerate(DRAWN) if drawn and WORDS[at]]
    await beside.nth(3).click()
    await expect(page.locator(".row-head h3")).to_have_text("step 20 · group 20 · row 4 of 4")
    await expect(beside.nth(3)).to_be_focused()


async def test_filters_a_search_and_an_order_leave_the_rows_that_fit(tmp_path: Path, browser: "Browser") -> None:
    write(tmp_path / "mine")
    page = await static(browser, tmp_path / "page.html", render(read_run(tmp_path / "mine")))
    count, items = page.locator(".count"), page.locator(".rows [role=option]")

    async def leaves(number: int) -> None:
        await expect(count).to_have_text(f"{number} of 17 rows")

    for name, told in (("truncated", "0-0-1"), ("error", "0-0-2"), ("stale", "0-0-3"), ("held out", "0-1-0")):
        await page.get_by_label(name, exact=True).check()
        await leaves(1)
        await expect(items).to_contain_text([told])
        await page.get_by_label(name, exact=True).uncheck()
    await page.get_by_label("search texts").fill("NO NUMBER")
    await leaves(1)
    await page.get_by_label("search texts").fill("")
    await page.get_by_label("reward from").fill("0.6")
    await leaves(4)
    await page.get_by_label("step from").fill("1")
    await leaves(2)
    await page.get_by_label("step from").fill("")
    await page.get_by_label("reward from").fill("")
    await page.get_by_label("tokens to").fill("13")
    await leaves(0)
    await page.get_by_label("tokens to").fill("")
    await page.get_by_label("order").select_option("lowest reward")
    await page.locator(".rows").focus()
    await page.keyboard.press("End")
    await expect(page.locator(".row-head .error")).to_have_text("ValueError: no number in it")
    await expect(items.and_(page.locator("[aria-selected=true]"))).to_contain_text("0-0-2")


async def test_ten_thousand_rows_and_a_long_one_have_few_elements_and_are_asked_for_as_one_looks(
    tmp_path: Path, browser: "Browser"
) -> None:
    folder, long = tmp_path / "mine", 32_000
    rng = np.random.default_rng(0)
    texts = [f" {word}" for word in rng.integers(0, 10**6, long)]
    numbers = np.round(-rng.random(long), 5).tolist()
    tokens = {"texts": texts, "tokens": list(range(long)), "sampler_logprobs": numbers, "versions": [3] * long}
    short = {"tokens": {"texts": ["a", "b"], "tokens": [1, 2], "versions": [0, 0]}}
    rows = [{"step": at, "prompt": f"p{at}", "completion": "c", "reward": at / 9999, **short} for at in range(9999)]
    append(folder / "samples.jsonl", *rows, {"step": 9999, "prompt": "long", "completion": "c", "tokens": tokens})
    append(folder / "metrics.jsonl", *metrics(2))
    page = await browser.new_page(viewport={"width": 1400, "height": 1000})
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    async with observe.Watcher(folder).serving() as watcher:
        await page.goto(watcher.address)
        await expect(page.locator(".count")).to_have_text("10,000 of 10,000 rows")
        title = page.locator(".told .title")
        await page.locator(".tokens").focus()
        most = 0
        elements = "document.querySelectorAll('.rows *, .tokens *').length"
        for key, at in (
            ("ArrowRight", 1),
            ("End", long),
            ("PageUp", None),
            ("Home", 1),
            ("ArrowDown", None),
            ("PageUp", 1),
        ):
            await page.keyboard.press(key)
            if at:
                await expect(title).to_have_text(f'"{texts[at - 1]}", token {at} of 32,000')
            most = max(most, await page.evaluate(elements))
        await page.evaluate("document.querySelector('.rows').scrollTop = 200_000")
        await expect(page.locator(".rows [role=option]").nth(5)).to_contain_text("p61")
        most = max(most, await page.evaluate(elements))
        assert most < 2500
        wanted = "/tokens/"
        assert [url.partition(wanted)[2] for url in asked if wanted in url] == ["9999"], "only what is looked at"
        await page.locator(".rows").focus()
        await page.keyboard.press("ArrowDown")
        await expect(page.locator(".row-head h3")).to_have_text("step 9998")
        await expect(page.locator(".tokens .turn")).to_have_text("model · 2 tokens")
        assert [url.partition(wanted)[2] for url in asked if wanted in url] == ["9999", "9998"]


async def test_the_tokens_of_a_compared_row_open_below_it(tmp_path: Path, browser: "Browser") -> None:
    for name in ("one", "two"):
        write(tmp_path / name)
    (tmp_path / "two" / "config.toml").write_text('algorithm = "grpo"\nlr = 1\n[task]\nsource = "some"\n', "utf-8")
    found = compare([read_run(tmp_path / name) for name in ("one", "two")])
    page = await static(browser, tmp_path / "page.html", render_comparison(found))
    opened = page.locator(".completion details").nth(1)
    await opened.locator("summary").click()
    await expect(opened.locator(".turn").first).to_have_text("prompt · 5 tokens")
    await opened.locator(".tokens").focus()
    await page.keyboard.press("End")
    await expect(opened.locator(".title")).to_have_text('" Yes", token 14 of 14')
