"""The models behind the server: a policy that is trained for its clients, and a sampler that takes their weights.

With adapters, the policy holds those of many clients on one frozen base, and the sampler those of many versions.
Without them, it trains all weights of one client's model at a time.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, NamedTuple

from meshrl.algo import Loss
from meshrl.data import ADAPTER, BASE, Batch, LossResult, Metrics, Ragged, Weights
from meshrl.errors import DataError
from meshrl.roles import LoraConfig, Policy, Sampler, SamplerConfig, Step
from meshrl.tinker.config import ServedConfig
from meshrl.tinker.library import Model
from meshrl.tinker.requests import Adam
from meshrl.tinker.weights_file import read_weights, write_weights

_KEPT: Final = 64
"""Versions of adapters that the sampler holds, at least those that are sampled from."""


class Version(NamedTuple):
    """The weights that were in a folder at some time. Others that replace them differ in one of these."""

    folder: Path
    inode: int
    changed: int
    """Nanoseconds."""


def version_of(folder: Path) -> Version:
    """Return what distinguishes a folder's weights from those that it had before, or will have."""
    found = folder.stat()
    return Version(folder, found.st_ino, found.st_mtime_ns)


class Models(ABC):
    """What can be done with the clients' models. Calls that change one come one at a time."""

    most: int
    """Models in the trainer, at most."""

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self._policy = policy
        self.sampler: Sampler = sampler

    @abstractmethod
    async def create(self, model: Model) -> None:
        """Make a new model, for which there is room."""

    @abstractmethod
    async def drop(self, model: str) -> None:
        """Forget a model."""

    @abstractmethod
    def adapter(self, model: str) -> str | None:
        """Return the name of a model's adapter. None if all weights are trained."""

    @abstractmethod
    async def hold(self, folder: Path | None) -> str:
        """Make the sampler hold the weights of a folder, or the base model's. Returns the name by which rows use them.

        Weights that are not adapters replace those that it has: call this while nothing is drawn. Call `release` when
        nothing is drawn from them any more.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Note that one use of the weights that `hold` returned has ended."""

    @property
    @abstractmethod
    def is_exclusive(self) -> bool:
        """True if the sampler holds one set of weights at a time."""

    async def logprobs(self, model: str, batch: Batch) -> Ragged:
        """Return the log-prob of each token, ragged float32."""
        scored = await self._policy.logprobs(self._named(model, batch))
        return (await scored.load("logprobs")).ragged("logprobs")

    async def encoded(self, batch: Batch) -> Batch:
        """Return `tokens` and `loss_mask` of texts, as the policy reads them."""
        return (await (await self._policy.encode(batch)).load()).only("tokens", "loss_mask")

    async def called(self, model: str, batch: Batch, loss: Loss) -> LossResult:
        """Add the gradients of rows of one model. Returns what the loss saw, and its metrics."""
        return await (await self._policy.forward_backward(self._named(model, batch), loss)).load()

    async def forward_backward(self, models: Sequence[str], batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Add the gradients of rows of several models, in one call.

        Returns for each model a batch with `logprobs` and `losses` of its rows, ragged float32.
        """
        rows = [self._named(model, batch) for model, batch in zip(models, batches, strict=True)]
        result: LossResult = await (await self._policy.forward_backward(Batch.concat(rows), loss)).load()
        ends = accumulate(map(len, batches), initial=0)
        return [result.rows.select(range(start, end)) for start, end in pairwise(ends)]

    async def step(self, model: str, adam: Adam) -> Mapping[str, float]:
        """Make an optimizer step. Returns its numbers."""
        step = Step(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or float("inf"),
        )
        return (await self.stepped(model, step)).means()

    async def stepped(self, model: str, step: Step) -> Metrics:
        """Make an optimizer step, with the values of the policy's table where `step` has none."""
        return await self._policy.step(step, self.adapter(model))

    async def write_state(self, model: str, folder: Path) -> None:
        """Write weights and optimizer into a folder."""
        await self._policy.checkpoint(str(folder), adapter=self.adapter(model))

    async def read_state(self, model: str, folder: Path, *, optimizer: bool) -> None:
        """Load what `write_state` wrote, with the optimizer or without."""
        await self._policy.restore(str(folder), self.adapter(model), optimizer)

    async def write_weights(self, model: str, folder: Path) -> None:
        """Write the weights for samplers into a folder."""
        write_weights(await (await self._policy.weights(self.adapter(model))).load(), folder)

    async def write_files(self, model: str, folder: Path) -> None:
        """Write the files that other libraries read: adapters like peft's, or a Hugging Face folder."""
        await self._policy.save(str(folder), self.adapter(model))

    def _named(self, model: str, batch: Batch) -> Batch:
        adapter = self.adapter(model)
        return batch if adapter is None else batch.assign(**{ADAPTER: [adapter] * len(batch)})


class AdapterModels(Models):
    """Clients' models that are adapters on one base."""

    def __init__(self, policy: Policy, sampler: Sampler, config: ServedConfig) -> None:
        super().__init__(policy, sampler)
        self.most: int = config.tinker.adapters
        self._config = config
        self._held: dict[str, int] = {}
        """The uses of each version that the sampler holds, the one that was used last at the end."""
        self._names: dict[Version, str] = {}
        """By weights that were read, the name under which the sampler holds them, if it still does."""
        self._holding = asyncio.Lock()

    async def create(self, model: Model) -> None:
        """Add an adapter."""
        await self._policy.add_adapter(_name_of(model.id), _lora_of(self._config, model))

    async def drop(self, model: str) -> None:
        """Drop an adapter."""
        await self._policy.drop_adapter(_name_of(model))

    def adapter(self, model: str) -> str | None:
        """Return the name of a model's adapter."""
        return _name_of(model)

    @property
    def is_exclusive(self) -> bool:
        """False."""
        return False

    async def hold(self, folder: Path | None) -> str:
        """Load a version of an adapter under its own name, unless it is there."""
        if folder is None:
            return BASE
        version = version_of(folder)
        async with self._holding:
            name = self._names.get(version)
            if name is None or name not in self._held:
                weights = await asyncio.to_thread(read_weights, folder)
                name = f"v-{weights.version}-{weights.fingerprint()}"  # rows tell the version, even of equal bytes
                if name not in self._held:
                    await self._make_room()
                    await self.sampler.load(weights.named(name))
                self._names = {known: each for known, each in self._names.items() if each in self._held}
                self._names[version] = name
            self._held[name] = self._held.pop(name, 0) + 1
        return name

    async def _make_room(self) -> None:
        while len(self._held) >= _KEPT and (idle := [each for each, uses in self._held.items() if not uses]):
            await self.sampler.drop_adapter(idle[0])
            del self._held[idle[0]]

    def release(self, name: str) -> None:
        """Count one use less."""
        if name != BASE:
            self._held[name] -= 1


class WholeModels(Models):
    """Clients' models whose weights are all trained, one at a time."""

    most: int = 1

    def __init__(self, policy: Policy, sampler: Sampler, initial: Path) -> None:
        """`initial`: a folder for the state of the base model."""
        super().__init__(policy, sampler)
        self._initial, self._base = initial, Weights(0, {})

    async def open(self) -> None:
        """Keep the base model. Call this before anything else."""
        await self._policy.checkpoint(str(self._initial))
        self._base = await (await self._policy.weights()).load()

    async def create(self, model: Model) -> None:
        """Begin with the base model."""
        await self._policy.restore(str(self._initial))

    async def drop(self, model: str) -> None:
        """Do nothing: the next model takes its place."""

    def adapter(self, model: str) -> str | None:
        """Return None."""
        return None

    @property
    def is_exclusive(self) -> bool:
        """True."""
        return True

    async def hold(self, folder: Path | None) -> str:
        """Load weights in place of those that the sampler has."""
        await self.sampler.load(self._base if folder is None else read_weights(folder))
        return BASE

    def release(self, name: str) -> None:
        """Do nothing."""


async def models_of(policy: Policy, sampler: Sampler, config: ServedConfig, initial: Path) -> Models:
    """Return the models of a configuration. `initial`: a folder for the base model's state, if all of it is trained."""
    if config.policy.is_adapted:
        return AdapterModels(policy, sampler, config)
    whole = WholeModels(policy, sampler, initial)
    await whole.open()
    return whole


def _name_of(model: str) -> str:
    """Return the name of a model as that of an adapter, which has no colons."""
    return model.replace(":", ".")


_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def _lora_of(config: ServedConfig, model: Model) -> LoraConfig:
    """Return the table of a model's adapters. DataError if its layers cannot be chosen."""
    lora = config.policy.lora or LoraConfig()
    targets = lora.targets
    if not (model.train_mlp and model.train_attn):
        if targets:
            raise DataError(
                "policy.lora.targets says which layers have adapters on this server: leave train_mlp and train_attn out"
            )
        targets = _MLP if model.train_mlp else _ATTENTION
    return lora.model_copy(
        update={"rank": model.rank or lora.rank, "seed": model.seed, "sync": "adapters", "targets": targets}
    )


def tables_of(config: ServedConfig) -> tuple[ServedConfig, SamplerConfig]:
    """Return the configuration and the sampler's table with room for clients' adapters, if they train adapters."""
    if not config.policy.is_adapted:
        return config, config.sampler
    policy = config.policy.model_copy(update={"lora": None, "adapters": {}})
    sampler = config.sampler.model_copy(update={"lora": None, "adapters": {}})
    return config.model_copy(update={"policy": policy}), sampler
