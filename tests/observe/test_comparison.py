import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshrl.errors import ConfigError
from meshrl.observe import Comparison, compare, read_run, render_comparison
from meshrl.observe.run_statistics import bootstrap
from tests.first_hour.terminal import type_in
from tests.observe.test_report import data_of

if TYPE_CHECKING:
    from playwright.async_api import Browser

STEPS = 100
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def a_run(folder: Path, *, lr: float = 1e-3, seed: int = 0, better: float = 0.0, source: str = "words") -> Path:
    luck, hard = np.random.default_rng(seed + 1), np.random.default_rng(7).uniform(0.0, 1.0, 200)
    rewards = (0.5 + better) * np.arange(STEPS) / STEPS + luck.uniform(-0.05, 0.05, STEPS)
    right = (hard + luck.uniform(-0.1, 0.1, 200) < 0.5 + better).astype(float)
    sample: dict[str, object] = {
        "step": 80,
        "prompt": f"{HOSTILE}>",
        "completion": f"{folder.name} {HOSTILE}",
        "reward": 0.5,
    }
    sample["images"] = ["data:image/png;base64,"]
    folder.mkdir(parents=True)
    write(
        folder / "metrics.jsonl",
        [
            {"step": step, "seconds": 2.0 * step, "step_s": 2.0, "rows": 8, "reward": reward}
            for step, reward in enumerate(rewards.tolist())
        ],
    )
    write(folder / "samples.jsonl", [sample])
    held_out(folder, right.tolist())
    (folder / "config.toml").write_text(
        f'algorithm = "grpo"\n[task]\nsource = "{source}"\n[policy]\nbackend = "torch"\nseed = {seed}\n'
        f"[policy.optimizer]\nlr = {lr}\n"
        f'[run]\nname = "{folder.name}"\nseed = {seed}\nresume = {"true" if seed else "false"}\n',
        "utf-8",
    )
    (folder / "summary.json").write_text(f'{{"status": "finished", "steps": {STEPS}}}', "utf-8")
    return folder


def held_out(folder: Path, rewards: Sequence[float | None], first: int = 0) -> None:
    numbered = enumerate(rewards, start=first)
    told = [
        {"prompt": f"{at}", "completion": f"{folder.name} {at}", "greedy": each, "sampled": each}
        for at, each in numbered
    ]
    write(folder / "held_out.jsonl", told)


def write(file: Path, lines: Sequence[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def compared(*folders: Path) -> Comparison:
    return compare([read_run(folder) for folder in folders])


def test_runs_that_differ_only_in_their_seed_are_one_group_with_a_band(tmp_path: Path) -> None:
    base = [a_run(tmp_path / f"base-{seed}", seed=seed) for seed in range(3)]
    slow = [a_run(tmp_path / f"slow-{seed}", lr=1e-4, seed=seed, better=-0.2) for seed in range(2)]
    found = compared(base[0], slow[0], base[1], slow[1], base[2])
    assert found.groups == ["base-0", "slow-0"]
    assert [(run.name, run.group, run.seed) for run in found.runs[:3]] == [(f"base-{s}", 0, str(s)) for s in range(3)]
    assert found.settings == {"policy.optimizer.lr": ["0.001", "0.0001"]}
    (rewards,) = (chart.lines for chart in found.charts if chart.name == "reward")
    for line in rewards:
        band = zip(line.low or (), line.mean, line.high or (), strict=True)
        assert all(low <= mean <= high for low, mean, high in band)
    assert rewards[0].mean[-1] == pytest.approx(0.49, abs=0.03)
    assert [len(runs) for runs in found.measures[0].runs] == [3, 2]
    assert not any(chart.name == "rows" for chart in found.charts)  # one and the same everywhere


def test_a_difference_is_told_where_there_is_one(tmp_path: Path) -> None:
    base, alike = a_run(tmp_path / "base"), a_run(tmp_path / "alike", lr=2e-3, seed=1)
    worse = a_run(tmp_path / "worse", lr=1e-4, better=-0.2)
    found = compared(base, alike, worse)
    assert [each.is_seen for each in found.differences] == [False] * 3 + [True] * 3
    held_out = found.differences[3]
    assert held_out.low < -0.2 < held_out.high < 0
    assert held_out.value == pytest.approx(held_out.values[1] - held_out.values[0])
    assert "lower in worse than in base" in held_out.sentence
    assert "more than chance over 200 prompts explains" in held_out.sentence
    assert held_out.sentence.endswith("variation between seeds is not included")
    assert compared(base, alike, worse).differences == found.differences  # seeded
    assert compare([read_run(base), read_run(worse)], seed=1).differences != found.differences[3:]


def test_an_interval_covers_the_true_difference_as_often_as_it_says_and_calls_noise_a_difference_seldom() -> None:
    luck = np.random.default_rng(0)
    held = 0
    for seed in range(50):
        hard = luck.normal(0, 1, 60)
        base, other = (hard + luck.normal(mean, 0.5, (1, 60)) for mean in (0.0, 0.3))
        _, low, high = bootstrap(base, other, seed, paired=True)
        held += low <= 0.3 <= high
        assert high - low < 0.5  # unpaired, what makes a prompt hard would be in it: about 0.8
    assert 44 <= held <= 49
    for paired in (True, False):
        luck = np.random.default_rng(0)
        wrong = 0
        for seed in range(100):
            base, other = luck.normal(size=(2, 1, 5))  # the fewest
            _, low, high = bootstrap(base, other, seed, paired=paired)
            wrong += low > 0 or high < 0
        assert 1 <= wrong <= 7  # of percentiles alone about 18

    luck = np.random.default_rng(0)  # seeds that differ widen the interval
    base = np.array([[0.2] * 50, [0.8] * 50, [0.5] * 50]) + luck.normal(0, 0.01, (3, 50))
    _, low, high = bootstrap(base, base[:1] + 0.3, 0, paired=True)
    _, alone, narrow = bootstrap(base[2:], base[:1] + 0.3, 0, paired=True)
    assert high - low > 0.4
    assert narrow - alone < 0.02


def test_forks_tell_where_they_come_from_and_are_a_group_of_their_own(tmp_path: Path) -> None:
    base, fork = a_run(tmp_path / "base"), a_run(tmp_path / "fork", lr=1e-4)
    plain = a_run(tmp_path / "plain", lr=1e-4)
    lineage = {"run": str(base), "step": 40, "changed": ["policy.optimizer.lr=1e-4"]}
    (fork / "fork.json").write_text(json.dumps(lineage), "utf-8")
    found = compared(base, fork, plain)
    assert found.groups == ["base", "fork", "plain"]
    assert found.runs[1].lineage == "base, step 40, with policy.optimizer.lr=1e-4"
    assert found.settings == {
        "forked from": [None, "base, step 40", None],
        "policy.optimizer.lr": ["0.001", "0.0001", "0.0001"],
    }


def test_what_cannot_be_compared_is_refused_by_its_name(tmp_path: Path) -> None:
    base, other = a_run(tmp_path / "base"), a_run(tmp_path / "other", source="sums")
    empty = a_run(tmp_path / "empty")
    (empty / "metrics.jsonl").unlink()
    bare = a_run(tmp_path / "bare")
    (bare / "config.toml").unlink()
    for folders, told in (
        ((base,), "a comparison needs at least two runs, and .*base is one"),
        ((base, base), "is given twice"),
        ((base, empty), r"empty has no step in its metrics.jsonl"),
        ((base, bare), r"bare has no readable config.toml"),
        ((base, other), "of different tasks: task.source is words there and sums here"),
    ):
        with pytest.raises(ConfigError, match=told):
            compared(*folders)


def test_rewards_are_compared_at_the_same_time(tmp_path: Path) -> None:
    base, slow, none = (a_run(tmp_path / f"{lr}", lr=lr) for lr in (1e-3, 1e-4, 1e-5))
    for folder, seconds in ((base, 1), (slow, 2), (none, 1000)):
        lines = [{"step": n, "seconds": seconds * (n + 1.0), "reward": n / 100} for n in range(100)]
        write(folder / "metrics.jsonl", lines)
    measure = compared(base, slow, none).measures[-1]
    assert measure.name == "reward after 100.00 s"
    assert measure.values == [pytest.approx(0.945), pytest.approx(0.47), None]  # of ten steps, of five, of none


def test_what_is_left_out_of_held_out_rewards_is_told(tmp_path: Path) -> None:
    base, other = a_run(tmp_path / "base"), a_run(tmp_path / "other", lr=1e-4)
    second, third = a_run(tmp_path / "second", lr=1e-4, seed=1), a_run(tmp_path / "third", lr=1e-4, seed=2)
    held_out(base, [0.5] * 12)
    held_out(other, [0.0, *[None] * 2, *[1.0] * 9])
    held_out(second, [0.5] * 12, first=5)
    (third / "held_out.jsonl").unlink()
    found = compared(base, other, second, third)
    assert [each.over for each in found.differences[:2]] == ["10 prompts"] * 2
    assert found.measures[1].values == [0.5, 0.9]
    notes = "\n".join(found.notes)
    assert f"{second} held out different prompts than the first run of its group" in notes
    assert f"{third} has no held_out.jsonl" in notes
    assert "2 of the 12 held-out prompts of other have no held-out reward, greedy" in notes
    held_out(base, [0.5] * 12, first=50)
    assert any("base and other held out different prompts" in note for note in compared(base, other).notes)
    held_out(base, [0.5] * 2)
    few = compared(base, other)
    assert [each.measure for each in few.differences] == ["reward in the last 10 steps"]
    assert any("1 prompts in common, and the test needs at least 5" in note for note in few.notes)
    (base / "held_out.jsonl").unlink()
    assert any("base has no held_out.jsonl" in note for note in compared(base, other).notes)


def test_a_difference_that_does_not_vary_is_not_called_the_same(tmp_path: Path) -> None:
    solved, lost, again = (a_run(tmp_path / name, lr=lr) for name, lr in (("solved", 1.0), ("lost", 2.0), ("again", 3)))
    for folder, reward in ((solved, 1.0), (lost, 0.0), (again, 1.0)):
        held_out(folder, [reward] * 10)
    worse, _, _, same, _, _ = compared(solved, lost, again).sentences
    assert "1 lower in lost than in solved (0 and 1), the same for each of 10 prompts" in worse
    assert "nothing varies, so there is no interval" in worse
    assert same == "held-out reward, greedy: the same in again and in solved, 1"


def test_runs_of_one_seed_count_as_one_and_are_averaged_before_they_are_compared(tmp_path: Path) -> None:
    luck = np.random.default_rng(0)
    first, again, second, other = luck.uniform(size=(4, 20)).tolist()
    mean = [(one + two) / 2 for one, two in zip(first, again, strict=True)]

    def found(folder: Path, *runs: tuple[int, list[float]]) -> Comparison:
        folders = [a_run(folder / f"{at}", seed=seed) for at, (seed, _) in enumerate(runs)]
        for run, (_, rewards) in zip(folders, runs, strict=True):
            held_out(run, rewards)
        held_out(a_run(folder / "other", lr=1e-4), other)
        return compared(*folders, folder / "other")

    three = found(tmp_path / "three", (0, first), (0, again), (1, second))
    two = found(tmp_path / "two", (0, mean), (1, second))
    assert three.differences[0].seeds == (2, 1)
    assert three.sentences[0].endswith("variation between seeds is not included")
    assert "0, 1 have the same settings and the same seed: they count as one seed." in three.notes
    assert three.differences[:2] == two.differences[:2]
    assert three.measures[1].values == two.measures[1].values
    assert [len(runs) for runs in three.measures[1].runs] == [3, 1]
    curves = [chart.lines[0].mean for each in (three, two) for chart in each.charts if chart.name == "reward"]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_steps_that_a_run_has_not_made_are_told(tmp_path: Path) -> None:
    base, short, second = a_run(tmp_path / "base"), a_run(tmp_path / "short", lr=1e-4), a_run(tmp_path / "two", seed=1)
    for folder, steps in ((short, 50), (second, 80)):
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:steps]), "utf-8")
    notes = "\n".join(compared(base, short, second).notes)
    assert "(base at 99, two at 79): only steps that all of them have count" in notes
    assert "(base at 79, short at 49): each is compared by its own last steps" in notes


def test_the_command_writes_a_page_and_the_same_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (a_run(Path("runs/base")) / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": STEPS, "reward": 10**400, "seconds": 1.0}) + "\n")  # no float holds it
    a_run(Path("runs/slow"), lr=1e-4, better=-0.2)
    found = type_in("compare", "base", "slow", "--json", "found.json")
    assert (found.status, "wrote compare.html" in found.out) == (0, True)
    assert "policy.optimizer.lr" in found.out
    assert "lower in slow than in base" in found.out
    page = Path("compare.html").read_text("utf-8")
    assert data_of(page) == json.loads(Path("found.json").read_bytes())
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.process
async def test_a_browser_draws_the_page_and_a_prompt_is_text(tmp_path: Path, browser: "Browser") -> None:
    base, slow = a_run(tmp_path / "base"), a_run(tmp_path / "slow", lr=1e-4, better=-0.2)
    (tmp_path / "page.html").write_text(render_comparison(compared(base, slow)), "utf-8")
    page = await browser.new_page()
    await page.goto((tmp_path / "page.html").as_uri())
    titles = ["What is different", "What it came to", "Runs", "Curves", "The same prompts"]
    assert await page.locator("main h2").all_text_contents() == titles
    assert await page.locator('main path[d^="M"]').count() > 0
    assert HOSTILE in str(await page.locator("main").text_content())
    assert await page.locator("main img").count() == await page.locator("main .images img").count() == 1
    assert await page.title() == "base · slow · meshrl"
