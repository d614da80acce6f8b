"""Rows with images: the bytes of files that a step carries, and the time of a step against transformers alone.

    python bench/images.py --json F

The files of one group are counted in what goes to a sampler and comes back, with 8 completions a prompt and with 64.
Each file should be there once, whatever the number is. Then a step of cross entropy of the small LLaVA of sft/shapes is
timed, with rows of 64 different images, and of 8 images that 8 rows each have. The peer makes the same step by
transformers alone from the same tokens without the images, whose places have another token. About 1 minute.
"""

import asyncio
import statistics
import time
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.harness import Figure, arguments, figure, report
from meshrl import Batch, CrossEntropy, PolicyConfig, Task, TaskConfig
from meshrl.data import IMAGES, Images
from meshrl.run import load_job, shipped_configs
from meshrl_torch.model.loading import load
from meshrl_torch.train.one_rank import TorchPolicy

ROWS = 64


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    options = parser.parse_args()
    job = load_job(shipped_configs()["sft/shapes"], [])
    task, table = vars(job.config)["task"], vars(job.config)["policy"]
    assert isinstance(task, TaskConfig)
    assert isinstance(table, PolicyConfig)
    rows = next(Task.load(task).batches(ROWS, 0))
    timings = [
        asyncio.run(timed(table, rows.select(range(count)).repeat(ROWS // count), options.rounds))
        for count in (ROWS, 8)
    ]
    report("images", [*carried(rows), *timings], options.json)


def carried(rows: Batch) -> list[Figure]:
    """Count bytes of files on the wire, against one of each."""
    images = rows[IMAGES]
    assert isinstance(images, Images)
    whole = images.nbytes / 2**10
    figures: list[Figure] = []
    for n in (8, 64):
        sent, bare = (sum(part.nbytes for part in each.to_wire()[1]) for each in _two(rows.repeat(n)))
        figures.append(
            figure(f"files and names of {ROWS} images, {n} completions", (sent - bare) / 2**10, "KiB", whole)
        )
    return figures


def _two(rows: Batch) -> tuple[Batch, Batch]:
    return rows, rows.drop(IMAGES)


async def timed(table: PolicyConfig, rows: Batch, rounds: int) -> Figure:
    """Time a step with images, and one by transformers alone without."""
    policy, network = TorchPolicy(table), load(table).network
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    batch = await policy.encode(rows.assign(completion=[str(each) for each in rows.objects("answer")]))
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        await policy.update(batch, CrossEntropy())
        middle = time.perf_counter()
        blind(network, optimizer, batch)
        times.append((middle - start, time.perf_counter() - middle))
    own, peer = (statistics.median(each) for each in zip(*times[1:], strict=True))
    images = cast("Images", batch[IMAGES])
    return figure(f"a step of {ROWS} rows with {len(images.pool)} images", own, "s", peer)


def blind(network: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Make a step of the same tokens, without images."""
    longest = int(batch.tokens.lengths.max())
    ids = np.zeros((len(batch), longest), np.int64)
    for row, own in enumerate(batch.tokens):
        ids[row, : len(own)] = own
    inputs = torch.from_numpy(np.where(ids == network.config.image_token_index, 2, ids))
    logits = network(input_ids=inputs, use_cache=False).logits[:, :-1]
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    main()
