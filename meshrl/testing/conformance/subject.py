"""The subject of the checks: its mesh, and one rank of the plain backend to compare it with."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeAlias, TypeVar, cast

from meshrl.data import Batch, Weights
from meshrl.engines import make_engine
from meshrl.engines.local import LocalEngine
from meshrl.errors import BackendError, MeshrlError
from meshrl.mesh import Engine, Mesh, Resources, planned, stop
from meshrl.roles import (
    Critic,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    RewardModel,
    RewardTrainingConfig,
    Sampler,
    SamplerConfig,
    implementation,
    planner_of,
)
from meshrl.testing.conformance.compare import TOLERANCE, equal, loaded
from meshrl.testing.conformance.material import (
    LOSS,
    SLOTS,
    ModelFolders,
    ModelPair,
    prepare,
    prepare_pair,
    rollouts,
    with_logprobs,
)
from meshrl.testing.invariant_checker import PromiseBroken

P = ParamSpec("P")
R = TypeVar("R")

PLAIN: Final = "torch"
"""The backend for comparison: a whole model on one rank, without collectives."""

OPTIMIZER: Final = OptimizerConfig(lr=0.03, eps=0.01, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)
"""With these settings every part of a step shows in the weights, and rounding does not. With so large an epsilon, a
step is about as long as the gradient. Adam's default would make a full step even from a gradient that is zero except
for rounding. The bound of the norm is below the norms of these batches."""

_ROWS: Final = 14
"""Rows of a batch: some for each of several ranks, of many lengths."""

_START: Final = 300.0
"""Seconds that processes have to start and to make a first policy, which loads libraries."""

_GRACE: Final = 5.0
"""Seconds that a cancelled check has to end, and that a hanging mesh has to stop."""


@dataclass(frozen=True)
class Subject:
    """A backend on a mesh, in the terms of a configuration."""

    backend: str
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    """Axes of the mesh. The last one varies fastest."""
    engine: str = "local"
    """As `run.engine`: "local", "processes", "ray", or a Ray cluster's address."""
    keys: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further keys for the tables of its policy, critic and reference, and for its sampler those that fit."""
    resources: Resources = field(default_factory=lambda: Resources(cpus=1))
    """Resources of each rank."""
    tolerance: float = TOLERANCE
    """Largest difference of its numbers from the plain backend's."""
    weights: Weights | None = None
    """Weights for a sampler without a model. Checks that depend on a model are then left out."""
    seconds: float = 600.0
    """Time limit of a check in seconds. A check that takes longer fails as hanging."""
    temperatures: tuple[float, float] = (0.0, inf)
    """Lowest and highest temperature above 0 that its sampler supports. It must refuse others."""
    replays: bool = True
    """True if its sampler can repeat a record. Otherwise it must refuse one."""
    restrictions: int = 2
    """How many of `top_k` and `top_p` its sampler supports together. It must refuse more."""

    def __str__(self) -> str:
        return "-".join([self.backend, self.engine, *_flat(self.axes), *_flat(self.keys)])


def _flat(keys: Mapping[str, object]) -> list[str]:
    parts: list[str] = []
    for name, value in keys.items():
        parts += [f"{name}.{inner}" for inner in _flat(value)] if isinstance(value, Mapping) else [f"{name}{value}"]
    return parts


@dataclass(frozen=True)
class Side:
    """One backend on one mesh. Actors are stopped with the stack, or without a stack with the mesh."""

    backend: str
    mesh: Mesh
    keys: Mapping[str, object]
    model: ModelFolders
    stack: AsyncExitStack | None

    async def policy(self, **keys: object) -> Policy:
        """A new policy. `keys` override those of the suite."""
        return await self._role(Policy, PolicyConfig, {"optimizer": OPTIMIZER, **self.keys, **keys})

    async def critic(self, **keys: object) -> Critic:
        """A new critic, with a head that is not zero."""
        table = {"model": self.model.valued, "optimizer": OPTIMIZER, **self.keys, **keys}
        return await self._role(Critic, CriticConfig, table)

    async def reward_model(self, **keys: object) -> RewardModel:
        """A new reward model, whose head scores 0 unless `keys` name a reward model."""
        known = self._known(RewardTrainingConfig)
        return await self._role(RewardModel, RewardTrainingConfig, {"optimizer": OPTIMIZER, **known, **keys})

    async def reference(self, **keys: object) -> Reference:
        """A new reference."""
        return await self._role(Reference, ReferenceConfig, {**self.keys, **keys})

    async def sampler(self, **keys: object) -> Sampler:
        """A new sampler."""
        return await self._role(Sampler, SamplerConfig, {**self._known(SamplerConfig), **keys})

    async def spawn(self, create: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Spawn an actor on these ranks, in addition to the roles."""
        actor = await self.mesh.spawn(create, *args, **kwargs)
        if self.stack is not None:
            self.stack.push_async_callback(stop, actor)
        return actor

    def _known(self, schema: type[ModelConfig]) -> Mapping[str, object]:
        """The subject's keys that a table has."""
        known = {*schema.model_fields, *schema.open_tables()}
        return {name: value for name, value in self.keys.items() if name in known}

    async def _role(self, role: Callable[..., R], schema: type[ModelConfig], table: Mapping[str, object]) -> R:
        config = schema.model_validate({"backend": self.backend, "model": self.model.folder, **table})
        return planned(await self.spawn(implementation(role, self.backend), config), await planner_of(config))


@dataclass(frozen=True)
class Trial:
    """The arguments of a check."""

    own: Side
    """The subject."""
    plain: Side
    """The plain backend."""
    tolerance: float
    folder: Path
    """An empty folder that both sides see."""
    harness: "Harness"

    @property
    def model(self) -> ModelFolders:
        """The model of all roles of both sides."""
        return self.own.model

    async def policies(self, **keys: object) -> tuple[Policy, Policy]:
        """A new policy of each side, the subject's first."""
        return await self.own.policy(**keys), await self.plain.policy(**keys)

    async def critics(self, **keys: object) -> tuple[Critic, Critic]:
        """A new critic of each side, the subject's first."""
        return await self.own.critic(**keys), await self.plain.critic(**keys)

    async def reward_models(self, **keys: object) -> tuple[RewardModel, RewardModel]:
        """A new reward model of each side, the subject's first."""
        return await self.own.reward_model(**keys), await self.plain.reward_model(**keys)

    @property
    def subject(self) -> Subject:
        """The tested backend."""
        return self.harness.subject

    async def pair(self, tied: bool = True) -> ModelPair:
        """The models that a sampler begins with and loads."""
        harness, place = self.harness, self.harness.place / ("tied" if tied else "untied")
        return await harness.once(("pair", tied), lambda: prepare_pair(harness.plain_policy, place, tied))

    async def sampler(self, tied: bool = True) -> Sampler:
        """A sampler of the pair's old model, with whatever weights the last check left.

        All checks share it, because an engine may take long to start.
        """
        samplers = self.harness.samplers
        if tied not in samplers:
            samplers[tied] = await replace(self.own, stack=None).sampler(model=(await self.pair(tied)).old, slots=SLOTS)
        return samplers[tied]

    async def batches(self, count: int = 3) -> list[Batch]:
        """Different batches of rollouts, with the log-probs that losses read."""

        async def make(seed: int) -> Batch:
            scored = await (await self.plain.policy()).logprobs(rollouts(self.model, _ROWS, seed))
            return with_logprobs(scored, seed)

        return [await self.harness.once((self.model, seed), partial(make, seed)) for seed in range(count)]

    async def standard(self, policy: Policy) -> None:
        """Require that a policy without updates makes the subject's first update bit for bit."""
        (batch,) = await self.batches(1)

        async def undisturbed() -> tuple[dict[str, float], int, str]:
            return await update_result(await self.own.policy(), batch)

        expected = await self.harness.once(("first update", self.model), undisturbed)
        result = await update_result(policy, batch)
        equal("the version after one update", result[1], 1)
        equal("the next update, which should be that of an undisturbed policy,", result, expected)


async def update_result(policy: Policy, batch: Batch) -> tuple[dict[str, float], int, str]:
    """An update's metrics, and the version and the fingerprint of the weights after it."""
    metrics = await policy.update(batch, LOSS)
    weights = await loaded(policy)
    return metrics.means(), weights.version, weights.fingerprint()


Check: TypeAlias = Callable[[Trial], Awaitable[None]]
"""One guarantee, stated by its docstring. Raises `PromiseBroken`."""


class Harness:
    """The meshes on which a subject's checks run, one after another. Each has new actors, except samplers.

    Checks run with the Hugging Face folder `model`, or by default with a Llama of two layers. Its weights should be
    large enough that log-probs differ.
    """

    def __init__(self, subject: Subject, ranks: Callable[[int], Awaitable[Mesh]] | None = None) -> None:
        """`ranks`: returns a mesh with this number of ranks, which others may use too. By default a new one."""
        self.subject = subject
        self._ranks = ranks
        self._engine: Engine | None = None
        self._stack = AsyncExitStack()
        self._started = False
        self._made: dict[Hashable, object] = {}
        self.samplers: dict[bool, Sampler] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.place: Path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshrl-conformance-")))
            beside = LocalEngine()
            stack.push_async_callback(beside.close)
            self._beside = await Mesh.reserve(beside, 1, Resources(cpus=1), "plain")
            await self._reserve()
            stack.push_async_callback(self._release)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def trial(self, model: str | None = None) -> AsyncGenerator[Trial]:
        """Both sides for one check. Their actors are stopped after it."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.place)))
            place = self.place / f"model-{len(self._made)}"
            prepared = await self.once(("model", model), lambda: prepare(self.plain_policy, place, model))
            own = Side(self.subject.backend, self._mesh, self.subject.keys, prepared, stack)
            plain = Side(PLAIN, self._beside, {}, prepared, stack)
            yield Trial(own, plain, self.subject.tolerance, folder, self)

    async def once(self, key: Hashable, make: Callable[[], Awaitable[R]]) -> R:
        """Return what `make` returns. It is called once for a key."""
        if key not in self._made:
            self._made[key] = await make()
        return cast("R", self._made[key])

    async def run(self, check: Check, model: str | None = None) -> None:
        """Run one check. Raises its error, or `PromiseBroken` if it does not end in time."""
        if not self._started:  # one-time setup does not count as the check's time
            await asyncio.wait_for(self._run(_begin, model), _START)
            self._started = True
        task = asyncio.ensure_future(self._run(check, model))
        try:
            await asyncio.wait({task}, timeout=self.subject.seconds)
            if not task.done():
                seconds = self.subject.seconds
                raise PromiseBroken(f"{name_of(check)} of {self.subject} has not ended after {seconds:g} s: it hangs")
            task.result()
        except BaseException:  # the next check must find the mesh usable, whatever this one left behind
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)
            await self._release()
            await self._reserve()
            raise

    async def _run(self, check: Check, model: str | None) -> None:
        async with self.trial(model) as trial:
            await check(trial)

    async def plain_policy(self, config: PolicyConfig) -> Policy:
        """A policy of the plain backend, which the caller stops."""
        return await self._beside.spawn(implementation(Policy, PLAIN), config)

    async def _reserve(self) -> None:
        count = prod(self.subject.axes.values())
        if self._ranks:
            mesh = await self._ranks(count)
        else:
            self._engine = make_engine(self.subject.engine)
            mesh = await Mesh.reserve(self._engine, count, self.subject.resources, "subject")
        self._mesh = mesh.shape(**self.subject.axes)
        self._started = False

    async def _release(self) -> None:
        samplers = list(self.samplers.values())
        self.samplers.clear()
        with suppress(TimeoutError, MeshrlError):
            async with asyncio.timeout(_GRACE):
                for sampler in samplers:
                    await stop(sampler)
                if self._engine:
                    await self._engine.close()


async def _begin(trial: Trial) -> None:
    try:
        await trial.sampler()
    except BackendError:  # the backend has no such role
        await trial.own.policy()


def name_of(check: Check) -> str:
    """The check's name, for messages and test ids."""
    return getattr(check, "__name__", repr(check))
