"""A critic without a model."""

from pathlib import Path

import numpy as np

from meshrl.advantages import Gae
from meshrl.critic import with_advantages
from meshrl.data import Batch
from meshrl.losses import Loss
from meshrl.metrics import Metrics
from meshrl.ragged import Ragged
from meshrl.roles import Critic, CriticConfig


class FakeCritic(Critic):
    """A critic that expects nothing: its values are 0, what follows from them is real."""

    def __init__(self, config: CriticConfig) -> None:
        self.updates: list[Batch] = []
        """Every batch that this rank was given."""

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Values of zero; advantages and returns from the rewards."""
        zeros = Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets)
        return with_advantages(batch, zeros, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn nothing; the loss is the mean square of the returns. DataError where the loss's columns are missing."""
        for name in loss.columns:
            batch[name]
        self.updates.append(batch)
        returns = np.asarray(batch.ragged("returns").values, np.float64)
        tokens = float(np.sum(batch.loss_mask.values))
        return Metrics.of(loss=(float(returns @ returns), tokens), tokens=(tokens, 1.0), rows=(float(len(batch)), 1.0))

    async def save(self, folder: str) -> None:
        """How often it was updated, as text."""
        _write(Path(folder), len(self.updates))


def _write(folder: Path, updates: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "updates").write_text(str(updates), "utf-8")
