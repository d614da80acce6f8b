"""What a backend builds for a role that is trained."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from meshrl.data import Batch, Metrics
from meshrl.errors import ConfigError
from meshrl.losses import Loss
from meshrl.mesh import Rank, current_rank
from meshrl_hf.boxes import Box
from meshrl_hf.scoring import Passes
from meshrl_hf.training import Steps


class State(Protocol):
    """A model in training, as checkpoints keep it."""

    def write(self, folder: str, wait: bool) -> None:
        """Write it, or, with `wait = False`, copy it for a thread to write. All ranks do it at once."""
        ...

    async def written(self) -> None:
        """Wait until the last copy is written. Raises what went wrong."""
        ...

    def read(self, folder: str) -> None:
        """Take what was written."""
        ...


class Trainable(ABC):
    """A model, what it predicts, and its optimizer, in the layout of a backend. All ranks call it at the same time."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Steps,
        state: State,
        turn: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 -- it has no state
    ) -> None:
        """`turn`: held while weights are read or changed, where calls may come between the passes of another."""
        self.passes, self.optimizer, self.state, self.turn = passes, optimizer, state, turn

    @abstractmethod
    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """One optimizer step, as `training.step`."""

    @abstractmethod
    def published(self) -> Iterable[tuple[str, Tensor]]:
        """What a sampler is given by this rank: whole tensors by their Hugging Face names."""

    def shards(self) -> Iterable[Box]:
        """This rank's own parts of what a sampler is given, in place; of parts that several ranks have one has it.

        ConfigError where it has no such parts.
        """
        raise ConfigError("policy.weight_sync = \"broadcast\" is for the backends 'torch' and 'fsdp': remove it")

    @abstractmethod
    def save(self, folder: str) -> None:
        """Write a Hugging Face folder, whole or not at all."""


def own_rank() -> Rank:
    """This rank, once torch knows how many threads it may use."""
    rank = current_rank()
    torch.set_num_threads(rank.threads)
    return rank
