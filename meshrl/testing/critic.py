"""A critic without a model."""

from collections import deque
from pathlib import Path

import numpy as np

from meshrl.algo import Gae, Loss, check_predicts, check_sources, with_advantages
from meshrl.data import Batch, Metrics, Ragged
from meshrl.roles import Critic, CriticConfig
from meshrl.testing.json_state import State, read_state


class FakeCritic(Critic):
    """A critic whose values are 0. What follows from them is real."""

    def __init__(self, config: CriticConfig) -> None:
        self.updates: deque[Batch] = deque(maxlen=256)
        """The last batches that this rank was given."""
        self._made = 0
        """Number of all updates, including those before a restore."""

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Return values of zero, and the advantages and returns that follow from the rewards."""
        zeros = Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets)
        return with_advantages(batch, zeros, gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn nothing, and return the metrics of `ValueLoss`.

        Raises DataError for a policy's loss, and for a missing column or one from another source than it says.
        """
        check_predicts(loss, "values")
        check_sources(batch, loss)
        for name in loss.columns:
            if name != "rows":
                batch[name]
        self.updates.append(batch)
        self._made += 1
        returns = np.asarray(batch.ragged("returns").values, np.float64)
        tokens = float(np.sum(batch.loss_mask.values))
        squares = float(returns @ returns)
        means = {"value": 0.0, "return": float(returns.sum()), "return_squared": squares, "value_error": squares}
        return Metrics({name: (total, tokens) for name, total in {"loss": squares / 2, **means}.items()})

    async def save(self, folder: str) -> None:
        """Write the number of updates as text."""
        _write(Path(folder), self._made)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the number of updates."""
        State("fake critic", self._made).write(folder)

    async def restore(self, folder: str) -> None:
        """Read the number of updates."""
        self._made = read_state(folder, "fake critic").updates
        self.updates.clear()


def _write(folder: Path, updates: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "updates").write_text(str(updates), "utf-8")
