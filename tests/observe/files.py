from pathlib import Path

import msgspec

from meshrl.events import Delivery, Event, Span, Step
from meshrl.observe.run_files import Line


def lines(*values: object) -> bytes:
    return msgspec.json.Encoder().encode_lines(values)


def append(file: Path, *values: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(lines(*values))


def metrics(steps: int, first: int = 0) -> list[Line]:
    numbers: Line = {"tokens": 30.0, "staleness": 1.5, "step_s": 1.0}
    return [
        {"step": at, "seconds": 1.0 + at, "reward": at / 8, "loss": at / 4, "lr": None if at else 0.5, **numbers}
        for at in range(first, first + steps)
    ]


def events(steps: int, first: int = 0) -> list[Event]:
    made: list[Event] = []
    for step in range(first, first + steps):
        began = 1.0 + step
        made += [
            Span(step, "sampler", 0, "Sampler", "generate", began, began + 0.5),
            Span(step, "main", 0, "Policy", "update", began + 0.5, began + 0.75),
            Delivery(step, began + 0.5, 4, [3, 1], {"stale": 1}),
            Step(step, began, began + 1),
        ]
    return made
