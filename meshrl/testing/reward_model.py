"""A reward model without a model."""

from collections import deque
from pathlib import Path
from typing import cast

import numpy as np

from meshrl.algo import Loss, check_predicts
from meshrl.data import Batch, Metrics, Ragged
from meshrl.roles import RewardModel, RewardTrainingConfig
from meshrl.testing.json_state import State, read_state


class FakeRewardModel(RewardModel):
    """A reward model whose scores grow by `rate` per update: positive for texts like `answer`, negative for others.

    Before its first update all scores are 0.
    """

    def __init__(self, config: RewardTrainingConfig, rate: float = 0.1) -> None:
        self.rate = rate
        self.updates: deque[Batch] = deque(maxlen=256)
        """The last batches that this rank was given."""
        self._made = 0
        """Number of all updates, including those before a restore."""

    @property
    def version(self) -> int:
        """Number of updates that made its scores."""
        return self._made

    async def encode(self, batch: Batch) -> Batch:
        """Encode one token per character, and one at the end."""
        tokens: list[list[int]] = []
        masks: list[list[bool]] = []
        for prompt, steps in zip(_texts(batch, "prompt"), _steps(batch), strict=True):
            tokens.append([*map(ord, prompt + "".join(steps)), 0])
            ends = len(prompt) - 1 + np.cumsum([len(step) for step in steps])
            scored = {*ends[:-1].tolist(), len(tokens[-1]) - 1}
            masks.append([at in scored for at in range(len(tokens[-1]))])
        return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))

    async def score(self, batch: Batch) -> Batch:
        """Compare `completion` with `answer`."""
        pairs = zip(_texts(batch, "completion"), _texts(batch, "answer"), strict=True)
        rewards = np.array([self._score(one == other) for one, other in pairs], np.float32)
        return batch.assign(rewards=rewards, reward_error=[None] * len(batch))

    async def token_scores(self, batch: Batch) -> Batch:
        """Compare the text up to the end of each step, or of the completion, with `answer`."""
        scores: list[float] = []
        for steps, answer in zip(_steps(batch), _texts(batch, "answer"), strict=True):
            begun = ["".join(steps[: at + 1]) for at in range(len(steps))]
            right = [answer.startswith(text) for text in begun[:-1]]
            scores += [self._score(each) for each in (*right, begun[-1] == answer)]
        mask = batch.loss_mask
        values = np.zeros(len(mask.values), np.float32)
        values[np.asarray(mask.values, np.bool_)] = scores
        return batch.assign(token_scores=Ragged(values, mask.offsets))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn. Raises DataError for another kind of model's loss, or a missing column."""
        check_predicts(loss, "scores")
        for name in loss.columns:
            if name != "rows":
                batch[name]
        self.updates.append(batch)
        self._made += 1
        count = float(np.sum(batch.loss_mask.values))
        return Metrics.of(loss=(count * np.exp(-self.rate * self.version), count), rows=(float(len(batch)), 1.0))

    async def save(self, folder: str) -> None:
        """Write the number of updates as text."""
        _write(Path(folder), self.version)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the number of updates."""
        State("fake reward model", self.version).write(folder)

    async def restore(self, folder: str) -> None:
        """Read the number of updates."""
        self._made = read_state(folder, "fake reward model").updates
        self.updates.clear()

    def _score(self, right: bool) -> float:
        return self.rate * self.version * (1 if right else -1)


def _write(folder: Path, updates: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "updates").write_text(str(updates), "utf-8")


def _texts(batch: Batch, name: str) -> tuple[str, ...]:
    return cast("tuple[str, ...]", batch.objects(name)) if len(batch) else ()


def _steps(batch: Batch) -> list[tuple[str, ...]]:
    """The steps of each row. A completion is one step."""
    if "steps" in batch:
        return [tuple(cast("tuple[str, ...]", steps)) for steps in (batch.objects("steps") if len(batch) else ())]
    return [(text,) for text in _texts(batch, "completion")]
