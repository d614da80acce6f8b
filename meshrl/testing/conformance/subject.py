"""The subject of the checks: its mesh, and one rank of the plain backend to compare it with."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeAlias, TypeVar

from meshrl.data import Batch, Metrics
from meshrl.engines import make_engine
from meshrl.engines.local import LocalEngine
from meshrl.errors import BackendError, MeshrlError
from meshrl.mesh import Engine, Mesh, Resources, stop
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
)
from meshrl.testing.conformance.compare import TOLERANCE, loaded, require
from meshrl.testing.conformance.material import LOSS, SLOTS, Model, Pair, prepare, prepare_pair, rollouts, with_logprobs
from meshrl.testing.witness import PromiseBroken
from meshrl.weights import Weights

P = ParamSpec("P")
R = TypeVar("R")

PLAIN: Final = "torch"
"""The backend that others are compared with: a whole model on one rank, no collective anywhere."""

OPTIMIZER: Final = OptimizerConfig(lr=0.03, eps=0.01, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)
"""Every part of a step shows in the weights, and rounding does not: with so large an epsilon a step is about as long as
the gradient, where Adam's own would make a full step of the sign of a gradient that is zero but for rounding. The
norm's bound is below the norms of these batches."""

_ROWS: Final = 14
"""Of a batch: some for each of several ranks, and of many lengths."""

_START: Final = 300.0
"""Seconds that processes have to start and to make a first policy, which loads libraries."""

_GRACE: Final = 5.0
"""Seconds that a check has to end after it was cancelled, and a mesh that hangs to be given back."""


@dataclass(frozen=True)
class Subject:
    """A backend on a mesh, as a configuration would name them."""

    backend: str
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    """The axes of the mesh, the last one fastest."""
    engine: str = "local"
    """As `run.engine`: "local", "processes", "ray", or a Ray cluster's address."""
    keys: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further keys of the tables of its policy, critic and reference, and of its sampler those that one has."""
    resources: Resources = field(default_factory=lambda: Resources(cpus=1))
    """What each rank may use."""
    tolerance: float = TOLERANCE
    """How far its numbers may be from the plain backend's."""
    weights: Weights | None = None
    """What its sampler loads, where it holds no model: it is then asked for nothing that hangs on a model."""
    seconds: float = 60.0
    """How long one check may take. A check that takes longer hangs, and fails."""
    temperatures: tuple[float, float] = (0.0, inf)
    """The lowest and the highest above 0 that its sampler draws at; others it has to refuse."""
    replays: bool = True
    """Whether its sampler can repeat a record; otherwise it has to refuse one."""
    restrictions: int = 2
    """How many of `top_k` and `top_p` its sampler takes at once; more it has to refuse."""

    def __str__(self) -> str:
        axes = [f"{axis}{size}" for axis, size in self.axes.items()]
        return "-".join([self.backend, self.engine, *axes, *_flat(self.keys)])


def _flat(keys: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for name, value in keys.items():
        found += [f"{name}.{inner}" for inner in _flat(value)] if isinstance(value, Mapping) else [f"{name}{value}"]
    return found


class Side:
    """One backend on one mesh. What is spawned is stopped with the stack, and without one with the mesh."""

    def __init__(
        self, backend: str, mesh: Mesh, keys: Mapping[str, object], model: Model, stack: AsyncExitStack | None
    ) -> None:
        self.model = model
        self._backend = backend
        self._mesh = mesh
        self._keys = keys
        self._stack = stack

    async def policy(self, **keys: object) -> Policy:
        """A fresh policy; `keys` go before those of the suite."""
        return await self._role(Policy, PolicyConfig, {"optimizer": OPTIMIZER, **self._keys, **keys})

    async def critic(self, **keys: object) -> Critic:
        """A fresh critic, with a head that is not zero."""
        table = {"model": self.model.valued, "optimizer": OPTIMIZER, **self._keys, **keys}
        return await self._role(Critic, CriticConfig, table)

    async def reward_model(self, **keys: object) -> RewardModel:
        """A fresh reward model, with a head whose scores are 0 unless `keys` name a judge."""
        known = self._known(RewardTrainingConfig)
        return await self._role(RewardModel, RewardTrainingConfig, {"optimizer": OPTIMIZER, **known, **keys})

    async def reference(self, **keys: object) -> Reference:
        """A fresh reference."""
        return await self._role(Reference, ReferenceConfig, {**self._keys, **keys})

    async def sampler(self, **keys: object) -> Sampler:
        """A fresh sampler."""
        known = self._known(SamplerConfig)
        return await self._role(Sampler, SamplerConfig, {**known, **keys})

    async def spawn(self, create: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """An actor on these ranks, beside the roles."""
        actor = await self._mesh.spawn(create, *args, **kwargs)
        if self._stack is not None:
            self._stack.push_async_callback(stop, actor)
        return actor

    def _known(self, schema: type[ModelConfig]) -> Mapping[str, object]:
        """Of the subject's keys those that a table has."""
        known = {*schema.model_fields, *schema.open_tables()}
        return {name: value for name, value in self._keys.items() if name in known}

    async def _role(self, role: Callable[..., R], schema: type[ModelConfig], table: Mapping[str, object]) -> R:
        config = schema.model_validate({"backend": self._backend, "model": self.model.folder, **table})
        return await self.spawn(implementation(role, self._backend), config)


@dataclass(frozen=True)
class Trial:
    """What one check is given."""

    own: Side
    """The subject."""
    plain: Side
    """What it is compared with."""
    tolerance: float
    folder: Path
    """An empty folder that both sides see."""
    harness: "Harness"

    @property
    def model(self) -> Model:
        """What all roles of both sides begin with."""
        return self.own.model

    async def policies(self, **keys: object) -> tuple[Policy, Policy]:
        """A fresh policy of each side, the subject's first."""
        return await self.own.policy(**keys), await self.plain.policy(**keys)

    async def critics(self, **keys: object) -> tuple[Critic, Critic]:
        """A fresh critic of each side, the subject's first."""
        return await self.own.critic(**keys), await self.plain.critic(**keys)

    async def reward_models(self, **keys: object) -> tuple[RewardModel, RewardModel]:
        """A fresh reward model of each side, the subject's first."""
        return await self.own.reward_model(**keys), await self.plain.reward_model(**keys)

    @property
    def subject(self) -> Subject:
        """What is tested."""
        return self.harness.subject

    async def pair(self, tied: bool = True) -> Pair:
        """What a sampler begins with, and what it is given."""
        return await self.harness.pair(tied)

    async def batches(self, count: int = 3) -> list[Batch]:
        """Different batches of rollouts, with the log-probs that losses read."""
        return [await self.harness.batch(self, seed) for seed in range(count)]

    async def standard(self, policy: Policy) -> None:
        """Require that the policy, which was never updated, makes the subject's first update, to the bit."""
        expected, fingerprint = await self.harness.standard(self)
        metrics = await policy.update((await self.batches(1))[0], LOSS)
        weights = await loaded(policy)
        require(weights.version == 1, f"one update was made, and the weights are of version {weights.version}")
        same = metrics.means() == expected.means() and weights.fingerprint() == fingerprint
        require(same, f"the next update is not that of an undisturbed policy: it tells {metrics}, and not {expected}")


Check: TypeAlias = Callable[[Trial], Awaitable[None]]
"""One promise, told by its docstring. Raises `PromiseBroken`."""


class Harness:
    """The meshes on which a subject's checks run, one after another, each with actors of its own, but for samplers.

        async with Harness(Subject("mine", {"dp": 2})) as harness:
            for check in CHECKS:
                await harness.run(check)

    Checks run with the Hugging Face folder `model`, whose weights should be so large that log-probs differ, or with a
    Llama of two layers.
    """

    def __init__(self, subject: Subject, ranks: Callable[[int], Awaitable[Mesh]] | None = None) -> None:
        """`ranks`: gives a mesh of so many ranks, which others use before and after; nothing means one of its own."""
        self.subject = subject
        self._ranks = ranks
        self._engine: Engine | None = None
        self._stack = AsyncExitStack()
        self._started = False
        self._models: dict[str | None, Model] = {}
        self._pairs: dict[bool, Pair] = {}
        self._standards: dict[Model, tuple[Metrics, str]] = {}
        self._batches: dict[tuple[Model, int], Batch] = {}
        self._samplers: dict[bool, Sampler] = {}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshrl-conformance-")))
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
        """Both sides, for one check; its actors are stopped after it."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._place)))
            prepared = await self._prepared(model)
            own = Side(self.subject.backend, self._mesh, self.subject.keys, prepared, stack)
            plain = Side(PLAIN, self._beside, {}, prepared, stack)
            yield Trial(own, plain, self.subject.tolerance, folder, self)

    async def run(self, check: Check, model: str | None = None) -> None:
        """Run one check. Raises what it raises, and `PromiseBroken` where it does not end in time."""
        if not self._started:  # what comes once is no part of the check's time
            await asyncio.wait_for(self._run(_begin, model), _START)
            self._started = True
        task = asyncio.ensure_future(self._run(check, model))
        try:
            await asyncio.wait({task}, timeout=self.subject.seconds)
            if not task.done():
                seconds = self.subject.seconds
                raise PromiseBroken(f"{name_of(check)} of {self.subject} has not ended after {seconds:g} s: it hangs")
            task.result()
        except BaseException:  # whatever it left behind, the next check finds a mesh in order
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE)
            await self._release()
            await self._reserve()
            raise

    async def batch(self, trial: Trial, seed: int) -> Batch:
        """Rollouts, made once."""
        key = trial.model, seed
        if key not in self._batches:
            scored = await (await trial.plain.policy()).logprobs(rollouts(trial.model, _ROWS, seed))
            self._batches[key] = with_logprobs(scored, seed)
        return self._batches[key]

    async def pair(self, tied: bool) -> Pair:
        """Two models for samplers, made once."""
        if tied not in self._pairs:
            place = self._place / ("tied" if tied else "untied")
            self._pairs[tied] = await prepare_pair(self._plain_policy, place, tied)
        return self._pairs[tied]

    async def sampler(self, trial: Trial, tied: bool) -> Sampler:
        """A sampler of the pair's old model, with whatever weights the last check left there.

        One does for all checks: an engine that takes long to start need not start for each.
        """
        if tied not in self._samplers:
            side = Side(self.subject.backend, self._mesh, self.subject.keys, trial.model, stack=None)
            self._samplers[tied] = await side.sampler(model=(await self.pair(tied)).old, slots=SLOTS)
        return self._samplers[tied]

    async def standard(self, trial: Trial) -> tuple[Metrics, str]:
        """The metrics and the fingerprint of the weights of the subject's first update, made once."""
        if trial.model not in self._standards:
            policy = await trial.own.policy()
            metrics = await policy.update((await trial.batches(1))[0], LOSS)
            self._standards[trial.model] = metrics, (await loaded(policy)).fingerprint()
        return self._standards[trial.model]

    async def _run(self, check: Check, model: str | None) -> None:
        async with self.trial(model) as trial:
            await check(trial)

    async def _prepared(self, model: str | None) -> Model:
        if model not in self._models:
            place = self._place / f"model-{len(self._models)}"
            self._models[model] = await prepare(self._plain_policy, place, model)
        return self._models[model]

    async def _plain_policy(self, config: PolicyConfig) -> Policy:
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
        samplers = list(self._samplers.values())
        self._samplers.clear()
        with suppress(TimeoutError, MeshrlError):
            async with asyncio.timeout(_GRACE):
                for sampler in samplers:
                    await stop(sampler)
                if self._engine:
                    await self._engine.close()


async def _begin(trial: Trial) -> None:
    try:
        await trial.harness.sampler(trial, tied=True)
    except BackendError:  # the backend has none
        await trial.own.policy()


def name_of(check: Check) -> str:
    """The check's name, for messages and test ids."""
    return getattr(check, "__name__", repr(check))
