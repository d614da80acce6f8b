"""Milliseconds of a call of a user's reward function in its process, beside the same call in the caller's process.

    python bench/user_code.py --json F [--rounds N]

The function returns a number, so that only the way to it costs time. `FunctionReward.score` judges a batch of 256 rows,
with completions of 100 and of 10,000 characters. The shortest wall time of a batch counts, by rows. The peer is the
same function with a lock in its closure: what cannot be pickled is called in the caller's process. A few seconds.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from bench.harness import Figure, arguments, at_most, report, take_turns
from meshrl import Batch, RewardConfig
from meshrl.tasks.function import FunctionReward

ROWS: Final = 256
MOST: Final = 0.3
"""Milliseconds of a call."""


def plain(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """A function that costs nothing."""
    return 1.0


async def later(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """The same, async."""
    return 1.0


def held(function: Callable[..., object]) -> Callable[..., object]:
    """The function with a lock in its closure."""
    lock = threading.Lock()

    def holding(prompt: str, completion: str, row: Mapping[str, object]) -> object:
        with lock:
            return function(prompt, completion, row)

    return holding


def measured(rounds: int) -> list[Figure]:
    """The figures of both kinds of function, with short and long completions."""
    with asyncio.Runner() as runner:
        figures: list[Figure] = []
        for kind, function in (("plain", plain), ("async", later)):
            roles = {"apart": FunctionReward(RewardConfig(function=function))}
            roles["here"] = FunctionReward(RewardConfig(function=held(function)))
            for characters in (100, 10_000):
                texts = {"prompt": ["what?"] * ROWS, "completion": ["x" * characters] * ROWS}
                batch = Batch.of(**texts, answer=["1"] * ROWS, row=[{"question": "what?", "answer": "1"}] * ROWS)

                def once(role: FunctionReward, batch: Batch = batch) -> float:
                    began = time.perf_counter()
                    scored = runner.run(role.score(batch))
                    seconds = time.perf_counter() - began
                    assert scored.rewards.tolist() == [1.0] * ROWS
                    return seconds

                turns = {name: partial(once, role) for name, role in roles.items()}
                take_turns(turns, 2)
                times = {name: min(values) * 1e3 / ROWS for name, values in take_turns(turns, rounds).items()}
                name = f"a call of a batch, {kind}, {characters} characters"
                figures.append(at_most(name, times["apart"], "ms", MOST, times["here"]))
    return figures


if __name__ == "__main__":
    options = arguments(__doc__, rounds=20).parse_args()
    report("user_code", measured(options.rounds), options.json)
