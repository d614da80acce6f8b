"""Continuous batching against waiting for the longest row of a batch, in new tokens per CPU second on one thread.

    python bench/sampling.py --json F [--rounds N]

The quickstart's model, 512 rows of 64 prompts, and completion lengths log-uniform from 8 to 256 (as in a mixed task) or
all 72 (their mean, without anything to gain). With fewer slots than rows, a free slot is filled at once, together with
others (an eighth of the slots, the sampler's choice), or only when all slots are free, which is waiting. Ended rows
leave the forward pass in each case. Then the CPU time that a JSON schema of 30 fields adds to decoding 72 tokens a row,
of a model whose characters JSON needs, in six times as many turns. About 90 seconds a round.
"""

import time
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness import Figure, arguments, at_most, figure, median, report, take_turns
from meshrl import NewModel, SamplerConfig, Sampling
from meshrl.data import BASE, Branch, Constraint
from meshrl_torch.model.loading import load
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.text import encode_prompts
from meshrl_torch.sample.cache import Cache
from meshrl_torch.sample.decoder import Decoder
from meshrl_torch.sample.draw import Draw, key
from meshrl_torch.sample.rollouts import Request

ROWS: Final = 512
MODEL: Final = NewModel(characters="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY", max_tokens=288)
POLICIES: Final = {"refill at once": 0, "refill by eighths": 8, "wait for all": 1}
"""Divisor of the slots that gives the number of free slots to wait for. 0: a single one."""


def main() -> None:
    options = arguments(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    model = load(SamplerConfig(model=MODEL))
    rng = np.random.default_rng(0)
    ragged = np.exp(rng.uniform(np.log(8), np.log(257), ROWS)).astype(np.int64)
    figures: list[Figure] = []
    for lengths, limits in (("lengths 8 to 256", ragged), ("all lengths 72", np.full(ROWS, 72))):
        for slots in (512, 128, 32):
            shares = {name: share for name, share in POLICIES.items() if slots < ROWS or share == 1}
            turns = take_turns(
                {
                    name: partial(speed, model, limits, slots, slots // share if share else 1)
                    for name, share in shares.items()
                },
                options.rounds,
            )
            speeds = {name: median(values) for name, values in turns.items()}
            waiting = speeds.pop("wait for all")
            figures.append(figure(f"{lengths}, {slots} slots: wait for all", waiting, "tokens/CPU s"))
            figures += [
                figure(f"{lengths}, {slots} slots: {name}", value, "tokens/CPU s", waiting)
                for name, value in speeds.items()
            ]
    figures += constrained(6 * options.rounds)  # a core's speed varies by more than a schema costs
    report("sampling", figures, options.json)


def constrained(rounds: int) -> list[Figure]:
    """The cost of a schema, as a share of the time of free decoding."""
    model = load(SamplerConfig(model=MODEL.model_copy(update={"characters": MODEL.characters + '{}":,_ 0123456789'})))
    names = [f"field_{number}" for number in range(30)]
    text = {"type": "string", "minLength": 8}
    schema = {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
    forms = {"free": "", "with a schema of 30 fields": Constraint((Branch(schema),)).text}
    limits, figures = np.full(ROWS, 72), list[Figure]()
    for slots in (128, 32):
        turns = take_turns(
            {name: partial(speed, model, limits, slots, max(1, slots // 8), form) for name, form in forms.items()},
            rounds,
        )
        free, held = turns.values()
        pairs = zip(free, held, strict=True)  # of one round, because the cores' speed changes
        added = median([one / other - 1 for one, other in pairs])
        name = f"72 tokens, {slots} slots: with a schema of 30 fields"
        figures.append(figure(name, median(held), "tokens/CPU s", median(free)))
        figures.append(at_most(f"{slots} slots: time that the schema adds", added, "of decoding", 0.15))
    return figures


def speed(model: LanguageModel, limits: NDArray[np.int64], slots: int, refill: int, constraint: str = "") -> float:
    """New tokens per CPU second of one call."""
    rng = np.random.default_rng(1)
    letters = list("abcdefghijklmnop")
    prompts = ["".join(rng.choice(letters, rng.integers(3, 9))) for _ in range(ROWS // 8)]
    ids = encode_prompts(model, prompts)
    numbers = np.arange(ROWS)
    starts = np.array(list(map(len, ids)))[numbers // 8]
    request = Request(
        ids,
        numbers // 8,
        numbers,
        starts,
        limits,
        numbers,
        np.full(ROWS, BASE),
        np.full(ROWS, constraint, np.object_),
        ends=frozenset(),
        stop=(),
    )
    decoder = Decoder(model, Cache(), request, Draw(Sampling(), key(0)), slots, refill)
    start = time.process_time()
    while decoder.busy:
        decoder.step({BASE: 0})
    return float(limits.sum()) / (time.process_time() - start)


if __name__ == "__main__":
    main()
