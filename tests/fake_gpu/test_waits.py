"""What the host waits for in a step, and why."""

from collections import Counter
from pathlib import Path

from meshrl import ClippedLoss, PolicyConfig
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.backends.material import MODEL, rollouts

COPIES = ("copy to pageable memory", "copy from pageable memory", "cudaMemcpy")
WAITS = (*COPIES, "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
REASONS = {
    "step.py sums": "the loss and its metrics, once a step",
    "optimizer.py _total_norm": "the mask of the gradients that tp splits, once a step",
    "optimizer.py step": "the norm of the gradients, which decides if there is a step",
}
"""By file and function."""


async def waits(rows: int, tokens: int) -> Counter[str]:
    """Return how often the host waits in an update, by file and function."""
    from tests.support.fake_cuda import numbers  # noqa: PLC0415 -- of the fake alone

    policy = FsdpPolicy(PolicyConfig(model=MODEL, micro_batch_tokens=tokens))
    await policy.update(rollouts(rows), ClippedLoss())  # the first one makes the moments
    numbers.waits.clear()
    with numbers.watch():
        await policy.update(rollouts(rows), ClippedLoss())
    found = Counter[str]()
    for (what, place), count in numbers.waits.items():
        if what in WAITS:
            path, _, line = place.rpartition(":")
            found[f"{Path(path).name} {line.partition(' ')[2]}"] += count
    return found


async def test_a_step_waits_where_there_is_a_reason_and_not_in_each_micro_batch() -> None:
    few, many = await waits(24, 400), await waits(24, 40)
    assert many == few
    assert set(few) == set(REASONS)
