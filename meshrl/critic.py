"""What every critic makes of its values."""

from meshrl.advantages import Gae, gae
from meshrl.data import Batch, Ragged


def with_advantages(batch: Batch, values: Ragged, config: Gae) -> Batch:
    """The batch with `values` (float32, aligned with `tokens`), `advantages` and `returns`, as `gae` defines them.

    Reads `rewards`, `loss_mask`, and with `config.kl` above 0 `logprobs` and `reference_logprobs`. DataError where one
    is missing.
    """
    logprobs, reference = (
        batch.ragged(name) if config.kl and name in batch else None for name in ("logprobs", "reference_logprobs")
    )
    advantages, returns = gae(batch.rewards, values, batch.loss_mask, config, logprobs, reference)
    return batch.assign(values=values, advantages=advantages, returns=returns)
