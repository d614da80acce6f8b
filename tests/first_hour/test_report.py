"""The page of a first run: learning first, and nothing that says nothing."""

from pathlib import Path

import pytest

from meshrl.events import Delivery, Event, Span, Step, Wait
from meshrl.observe.page import make_content
from meshrl.observe.run_files import Record
from meshrl.observe.text import run_lines, time_lines

CONFIG = 'algorithm = "grpo"\nahead = 0\n\n[policy]\nbackend = "torch"\n'
UNUSED = "\n[policy.fsdp]\nreplicate = 1\n\n[sampler.vllm]\n"
EVENTS: list[Event] = [
    Span(1, "main", 0, "Sampler", "generate", 0, 2),
    Span(2, "main", 0, "Policy", "update", 2, 5),
    Step(0, 0, 6),
]


def record(config: str) -> Record:
    numbers: dict[str, object] = {"lr": 1.0, "kl": 0.0}
    lines = [{"step": step, "loss": -step, **numbers, "reward": step / 3, "entropy": 2.0 - step} for step in range(3)]
    evaluations: list[dict[str, object]] = [{"step": step, "eval/greedy": step / 4} for step in (0, 2)]
    return Record(Path("mine"), metrics=lines, evaluations=evaluations, events=EVENTS, config=config)


def test_learning_stands_in_front_and_what_says_nothing_does_not() -> None:
    content = make_content(record(CONFIG + UNUSED))
    names = [curve.name for curve in content.curves]
    assert names[: content.front] == ["reward", "eval/greedy", "entropy", "loss"]
    assert names[content.front :] == ["lr", "kl"]
    assert content.config == CONFIG
    assert make_content(record("no TOML")).config == "no TOML"
    assert content.efficiency is None
    assert make_content(record(CONFIG.replace("ahead = 0", "ahead = 1"))).efficiency == pytest.approx(3 / 6)


def test_where_the_time_went_is_told_in_text() -> None:
    told = dict(run_lines(Record(Path("mine"), events=[*EVENTS, Wait("trainer", "a batch", "", 0, 2)])))
    assert told["step time, mean"] == "6.00 s"
    assert told["parts of a step"].startswith("both at once: 0%, rollout alone: 33%, training alone: 50%, scoring: 0%")
    assert told["busy in a step"] == "rollout: 2.00 s, training: 3.00 s"
    assert (told["overlap efficiency"], told["bound by"]) == ("0.50", "training: 100%")
    assert dict(time_lines(1.0, {"sync": 1.0}, [], {}, []))["bound by"] == "new weights: 100%"
    assert told["main 0, idle a step"] == "1.00 s (between calls: the script's own work: 1.00 s)"
    aged = dict(run_lines(Record(Path("mine"), events=[*EVENTS, Delivery(0, 2, 8, [6, 2], {"stale": 1})])))
    assert (aged["rows by staleness"], aged["groups dropped"]) == ("0: 6, 1: 2", "stale: 1")
    assert run_lines(Record(Path("mine"))) == []
