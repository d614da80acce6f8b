"""What the host waits for in a step of each trainer, and why."""

from collections import Counter
from pathlib import Path

import pytest

from meshrl import ClippedLoss, PolicyConfig
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.backends.material import MODEL, rollouts

COPIES = ("copy to pageable memory", "copy from pageable memory", "cudaMemcpy")
WAITS = (*COPIES, "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
SUMS = {"step.py sums": "the loss and its metrics, once a step"}
REASONS = {
    FsdpPolicy: {**SUMS, "optimizer.py step": "the norm of the gradients, which decides if there is a step"},
    MegatronPolicy: {**SUMS, "optimizer.py step": "the same, and Megatron's own"},
}
"""By trainer, file and function."""


async def waits(trainer: type[FsdpPolicy | MegatronPolicy], rows: int, tokens: int) -> Counter[str]:
    """Return how often the host waits in an update, by file and function."""
    from tests.support.fake_cuda import numbers  # noqa: PLC0415 -- of the fake alone

    policy = trainer(PolicyConfig(model=MODEL, micro_batch_tokens=tokens))
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


@pytest.mark.parametrize("trainer", REASONS)
async def test_a_step_waits_where_there_is_a_reason_and_not_in_each_micro_batch(
    trainer: type[FsdpPolicy | MegatronPolicy],
) -> None:
    few, many = await waits(trainer, 24, 400), await waits(trainer, 24, 40)
    assert many == few
    assert set(few) == set(REASONS[trainer])
