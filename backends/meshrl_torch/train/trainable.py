"""A backend's model for a trained role."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from meshrl.algo import Loss
from meshrl.data import Batch, Metrics
from meshrl.mesh import Rank, current_rank
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.scoring import Passes
from meshrl_torch.train.step import Steps


class State(Protocol):
    """A model in training, for checkpoints."""

    def write(self, folder: str, wait: bool) -> None:
        """Write it, or with `wait = False` copy it for a thread to write. All ranks call it together."""
        ...

    async def written(self) -> None:
        """Wait until the last copy is written. Raises its error."""
        ...

    def read(self, folder: str) -> None:
        """Load the written state."""
        ...


class Trainable(ABC):
    """A model, its predictions and its optimizer, in the layout of a backend. All ranks call its methods together."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Steps,
        state: State,
        turn: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 -- stateless
    ) -> None:
        """`turn`: held while weights are read or changed, if calls may run between the passes of another call."""
        self.passes, self.optimizer, self.state, self.turn = passes, optimizer, state, turn

    @abstractmethod
    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step. See `training.step`."""

    @abstractmethod
    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's tensors for samplers: whole ones, by their Hugging Face names."""

    @abstractmethod
    def shards(self) -> Iterable[Box]:
        """Return this rank's parts of the tensors for samplers, as views. Each part comes from only one rank."""

    @abstractmethod
    def save(self, folder: str) -> None:
        """Write a Hugging Face folder, completely or not at all."""


def own_rank() -> Rank:
    """Return this rank, after setting torch's number of threads."""
    rank = current_rank()
    torch.set_num_threads(rank.threads)
    return rank
