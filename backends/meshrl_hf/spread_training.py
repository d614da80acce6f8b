"""What the roles that are trained on several ranks together have in common: their checkpoints."""

from meshrl.roles import Stateful
from meshrl_hf.ranks import Spread
from meshrl_hf.spread_state import SpreadState


class SpreadTraining(Spread, Stateful):
    """Base, beside its role, of what is trained and spread over ranks: all of them begin, write and read together."""

    _state: SpreadState

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write this rank's parts of the weights and of the optimizer's moments, and the number of steps."""
        self._state.write(folder, wait)

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._state.written()

    async def restore(self, folder: str) -> None:
        """Take what `checkpoint` wrote, also in another layout of ranks.

        ModelError, and nothing taken, where it is of another role or model; where a file cannot be read to its end, a
        part may be taken, and it says so.
        """
        self._state.read(folder)
