"""What the torch backend's trained roles have in common: one rank, one change at a time, and their checkpoints."""

import asyncio
from abc import abstractmethod

import torch

from meshrl.errors import ContractError
from meshrl.mesh import current_rank
from meshrl.roles import Stateful
from meshrl_hf.state import TrainingState
from meshrl_hf.writing import Writing


class OneRankTraining(Stateful):
    """Base, beside its role, of what is trained on one rank, with the threads that the rank may use."""

    def __init__(self, mesh: str) -> None:
        """`mesh`: its name in the run's table, for messages. ContractError where it has several ranks."""
        rank = current_rank()
        if rank.size > 1:
            raise ContractError(
                f"{type(self).__name__} trains on one rank, and its mesh has {rank.size}: "
                f"set run.meshes.{mesh}.ranks = 1"
            )
        torch.set_num_threads(rank.threads)
        self._updating = asyncio.Lock()
        """Held while weights are read or changed: an update lets other calls in between its micro-batches."""
        self._writing = Writing()

    @property
    @abstractmethod
    def _state(self) -> TrainingState:
        """What checkpoints keep, as it is now."""

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after the updates that were called."""
        async with self._updating:
            self._writing.begin(self._state.copied(folder))
        if wait:
            await self._writing.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._writing.written()

    async def restore(self, folder: str) -> None:
        """Take what `checkpoint` wrote; ModelError, and nothing taken, where it is of another role or model."""
        async with self._updating:
            self._state.read(folder)
