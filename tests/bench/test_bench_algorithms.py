"""The benchmark of all pages: budgets, counts, tables and the picture; what it measures is not run here."""

from xml.etree import ElementTree as ET

import pytest

from bench.algorithms import Result, Row, budget, completions, config, draw, figures, markdown, pages, ranked, seeds
from meshrl import RunConfig
from meshrl.events import Call, Event, Step
from meshrl.run import find_config, load_job
from meshrl.run.jobs import shipped_scripts

SVG = "{http://www.w3.org/2000/svg}"


def result(page: str, after: float, *, given: bool = False) -> Result:
    return Result(page, given, (0.25, after), (0.125, 0.5), drawn=512, trained=128, updates=4, wall=40, cpu=30)


@pytest.fixture
def rows() -> list[Row]:
    results = [result("low", 0.25), result("high", 0.5), result("high", 0.75), result("sft", 0.5, given=True)]
    return ranked(results)


def overrides(name: str) -> list[str]:
    return [*budget(name, config(name), 40), *seeds(3)]


@pytest.mark.parametrize("name", pages(None))
def test_a_budget_fits_the_page(name: str) -> None:
    job = load_job(find_config(f"{name}/quickstart"), overrides(name), RunConfig)
    assert vars(job.config)["steps"] == 40
    assert job.run.seed == 3


def test_a_budget_is_of_512_completions() -> None:
    assert "prompts=64" in overrides("grpo")
    assert "prompts=512" in overrides("reinforce")
    assert "prompts=256" in overrides("remax")
    assert "rows=256" in overrides("dpo")
    assert "rows=512" in overrides("kto")
    assert "prompts=32" in overrides("multiturn")  # 8 episodes each, of at most 2 turns


def test_no_page_evaluates_beside_its_training() -> None:
    assert "evaluation={every=1000000, rows=1, n=1}" in overrides("grpo")
    assert not any(each.startswith("evaluation") for each in overrides("rloo"))


def test_a_learning_rate_falls_to_0_at_the_last_update() -> None:
    assert "policy.optimizer.total_steps=40" in overrides("grpo")
    assert {"policy.optimizer.total_steps=80", "critic.optimizer.warmup_steps=8"} <= {*overrides("ppo")}


def test_pages_that_train_a_policy_are_measured_and_the_teacher_comes_first() -> None:
    assert pages(None)[0] == "grpo"
    assert {"grpo", "sft", "kto", "multiturn", "distill"} <= {*pages(None)} <= {*shipped_scripts()}
    assert pages(["distill", "sft"]) == ["grpo", "distill", "sft"]
    assert pages(["sft", "grpo"]) == ["grpo", "sft"]
    assert pages(["sft"]) == ["sft"]


def test_completions_are_counted_within_the_steps() -> None:
    events: list[Event] = [
        Call(1, "TorchSampler", "generate", 0.0, 0.5, rows=512),  # an evaluation
        Call(2, "TorchSampler", "generate", 1.0, 2.0, rows=64),
        Call(3, "TorchPolicy", "update", 2.0, 3.0, rows=500),
        Call(4, "TorchCritic", "update", 2.0, 3.0, rows=500),
        Step(0, 1.0, 3.0),
        Call(5, "TorchSampler", "generate", 3.0, 4.0, rows=64),
        Call(6, "TorchSampler", "generate", 3.0, 4.0, rows=64, error="RankFailed"),
        Step(1, 3.0, 5.0),
        Call(7, "TorchSampler", "generate", 6.0, 7.0, rows=512),
    ]
    assert completions(events, 8) == (1024, 500, 1)
    assert completions([], 8) == (0, 0, 0)


def test_the_best_page_is_first_and_seeds_are_averaged(rows: list[Row]) -> None:
    assert [row.page for row in rows] == ["high", "sft", "low"]
    assert (rows[0].greedy, rows[0].lowest, rows[0].highest) == ((0.25, 0.625), 0.5, 0.75)


def test_a_page_has_a_line_and_its_figures(rows: list[Row]) -> None:
    lines = markdown(rows).splitlines()
    assert lines[2] == "| `high` | 0.250 | 0.625 (0.500 to 0.750) | 0.125 | 0.500 | 512 | 128 | 4 | 40 | 30 |"
    assert lines[4].startswith("| `low` | 0.250 | 0.250 |")
    assert len({line.count("|") for line in lines}) == 1
    found = {each.name: each for each in figures(rows)}
    assert (found["exact match, greedy, high"].value, found["exact match, greedy, high"].peer) == (0.625, 0.25)
    assert found["CPU, low"].value == 30


def test_a_picture_has_two_bars_a_page(rows: list[Row]) -> None:
    root = ET.fromstring(draw(rows))  # noqa: S314 -- our own
    bars = [each.get("class") for each in root.iter(f"{SVG}rect") if each.get("x") == "170"]
    assert bars == ["before", "drawn", "before", "given", "before", "drawn"]
    widths = [float(each.get("width", 0)) for each in root.iter(f"{SVG}rect") if each.get("x") == "170"]
    assert widths[:2] == [100, 250]
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"high", "0.62", "30 s"} <= {*texts}
