"""The models behind the server: a policy that is trained for its clients, and a sampler that takes their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshrl.algo import Loss
from meshrl.data import Batch, Ragged, Weights
from meshrl.errors import DataError
from meshrl.roles import Policy, Sampler, Step
from meshrl.tinker.config import ServedConfig
from meshrl.tinker.library import Model
from meshrl.tinker.requests import Adam
from meshrl.tinker.weights_file import read_weights, write_weights


class Models:
    """What can be done with the clients' models. One call at a time changes them."""

    most: Final = 1
    """Models in the trainer, at most."""

    def __init__(self, policy: Policy, sampler: Sampler, config: ServedConfig, scratch: Path) -> None:
        self._policy, self.sampler, self._config = policy, sampler, config
        self._initial: Final = scratch / "initial"
        self._base: Weights | None = None

    async def open(self) -> None:
        """Keep the base model. Call it first."""
        await self._policy.checkpoint(str(self._initial))
        self._base = await (await self._policy.weights()).load()
        await self.sampler.load(self._base)

    async def create(self, model: Model) -> None:
        """Make a new model, for which there is room."""
        await self._policy.restore(str(self._initial))

    async def drop(self, model: str) -> None:
        """Forget a model, whose place another takes."""

    async def forget(self) -> None:
        """Forget all models."""

    async def logprobs(self, model: str, batch: Batch) -> Ragged:
        """Return the log-prob of each token, ragged float32."""
        scored = await self._policy.logprobs(batch)
        return (await scored.load("logprobs")).ragged("logprobs")

    async def forward_backward(self, model: str, batch: Batch, loss: Loss) -> tuple[Ragged, Ragged]:
        """Add gradients. Returns the log-prob and the loss of each token, ragged float32."""
        result = await (await self._policy.forward_backward(batch, loss)).load()
        return result.rows.ragged("logprobs"), result.rows.ragged("losses")

    async def step(self, model: str, adam: Adam) -> Mapping[str, float]:
        """Make an optimizer step. Returns its numbers."""
        clip = adam.grad_clip_norm or float("inf")
        step = Step(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=clip,
        )
        return (await self._policy.step(step)).means()

    async def write_state(self, model: str, folder: Path) -> None:
        """Write weights and optimizer into a folder."""
        await self._policy.checkpoint(str(folder))

    async def read_state(self, model: str, folder: Path, *, optimizer: bool) -> None:
        """Load what `write_state` wrote."""
        if not optimizer:
            raise DataError("this server loads weights with the optimizer's state alone: load_state_with_optimizer")
        await self._policy.restore(str(folder))

    async def write_weights(self, model: str, folder: Path) -> None:
        """Write the weights for samplers into a folder."""
        write_weights(await (await self._policy.weights()).load(), folder)

    async def write_files(self, model: str, folder: Path) -> None:
        """Write the files that other libraries read: adapters like peft's, or a Hugging Face folder."""
        await self._policy.save(str(folder))

    async def load_weights(self, folder: Path | None) -> None:
        """Load the weights of a folder into the sampler. None: those of the base model."""
        if folder is None:
            assert self._base is not None
            await self.sampler.load(self._base)
        else:
            await self.sampler.load(read_weights(folder))
