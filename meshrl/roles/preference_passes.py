"""The passes of a policy and its reference that preference losses read."""

from typing import Final

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.objectives import log_ratios, pair_margins
from meshrl.roles.base import Policy, Reference

_READ: Final = ("logprobs", "reference_logprobs", "loss_mask")


async def with_margins(policy: Policy, reference: Reference, batch: Batch) -> Batch:
    """Pairs with `logprobs`, `reference_logprobs`, `log_ratios` and `margins` (float32, one a row): before each update.

    The batch has tokens, `groups` and `preferred`. DataError where its rows are no pairs, or one has nothing to learn.
    """
    batch = await reference.logprobs(await policy.logprobs(batch))
    batch = await batch.load(*_READ, "groups", "preferred")
    learned = np.array([mask.any() for mask in batch.loss_mask], np.bool_)
    if not learned.all():
        raise DataError(
            f"row {int(np.flatnonzero(~learned)[0])} of the pairs has no learned token: `loss_mask` is False in all of "
            "it; leave its pair out"
        )
    ratios = log_ratios(batch)
    margins = pair_margins(ratios, batch.groups, batch.row("preferred"))
    return batch.assign(log_ratios=ratios.astype(np.float32), margins=margins.astype(np.float32))


async def mismatched_kl(policy: Policy, reference: Reference, batch: Batch) -> float:
    """An estimate of the policy's KL from the reference, in nats, as KTO takes it: never below 0.

    The mean log-ratio of the prompts' answers by the completions of others: each prompt with the next row's completion,
    over the whole batch. Needs `prompt` and `completion`. KTO (arXiv:2402.01306), the estimate of its reference point.
    """
    texts = (await batch.load("completion")).objects("completion")
    others = batch.only("prompt").assign(completion=[*texts[1:], *texts[:1]])
    others = await reference.logprobs(await policy.logprobs(await policy.encode(others)))
    return max(0.0, float(log_ratios(await others.load(*_READ)).mean()))
