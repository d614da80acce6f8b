"""Checks of a policy's state: its weights and their version, saved files, and the order of calls."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Final, TypeAlias

import numpy as np

from meshrl.algo import Gae, ValueLoss
from meshrl.data import Batch, Metrics, Ragged, Weights
from meshrl.errors import ModelError
from meshrl.roles import Policy, Sampling
from meshrl.testing.conformance.compare import alike, close, loaded, refused, require
from meshrl.testing.conformance.material import LOSS, SMALL, TEXTS, with_returns
from meshrl.testing.conformance.subject import Check, Trial

_SAMPLER_ERROR: Final = 1e-4
"""Largest difference in float32 between a sampler's and a policy's log-probs. It computes row by row, with a cache."""


async def weights(trial: Trial) -> None:
    """`weights` has the plain backend's names, shapes and dtypes, in bfloat16 too, and its version counts updates."""
    (batch,) = await trial.batches(1)
    for dtype in ("float32", "bfloat16"):
        own, plain = await trial.policies(dtype=dtype)
        found, expected = await loaded(own), await loaded(plain)
        alike(f"the weights in {dtype}", found.tensors, expected.tensors)
        require(found == expected, f"weights in {dtype} that were never updated are not those of the model's folder")
        await own.update(batch, LOSS)
        once = await loaded(own)
        await own.update(batch, LOSS)
        twice = await loaded(own)
        versions = [found.version, once.version, twice.version]
        require(versions == [0, 1, 2], f"before, between and after two updates the weights are of versions {versions}")
        prints = {each.fingerprint() for each in (found, once, twice)}
        require(len(prints) == 3, f"of the weights before, between and after two updates only {len(prints)} differ")


async def a_new_model(trial: Trial) -> None:
    """A model made from scratch equals the plain backend's of the same seed, and no other."""
    prints: list[str] = []
    for seed in (3, 4):
        own, plain = [await loaded(policy) for policy in await trial.policies(model=SMALL, seed=seed)]
        require(own == plain, f"the new model of seed {seed} is not the plain backend's")
        prints.append(own.fingerprint())
    require(prints[0] != prints[1], "the new models of two seeds are the same")


async def a_sampler_takes_the_weights(trial: Trial) -> None:
    """A sampler that loads the weights of a policy draws with the log-probs that the policy computes."""
    policy = await trial.own.policy()
    for batch in await trial.batches(2):
        await policy.update(batch, LOSS)
    sampler = await trial.plain.sampler()
    await sampler.load(await policy.weights())
    prompts = Batch.of(prompt=[text for text in TEXTS if text])
    drawn = [part async for part in sampler.generate(prompts, Sampling(n=4, max_tokens=8))]
    rollouts = await Batch.concat([await part.load() for part in drawn]).load()
    mask = np.asarray(rollouts.loss_mask.values, np.bool_)
    versions = np.unique(rollouts.versions.values[mask]).tolist()
    require(versions == [2], f"after two updates the sampler's tokens are of versions {versions}")
    scored = (await (await policy.logprobs(rollouts)).load()).ragged("logprobs").values
    close(
        "the policy's log-probs of what was sampled",
        scored[mask],
        rollouts.sampler_logprobs.values[mask],
        _SAMPLER_ERROR,
    )


async def saving(trial: Trial) -> None:
    """A saved folder has the weights of that moment, for either backend. It replaces a model, but no other files."""
    policy = await trial.own.policy()
    folder = trial.folder / "deeper" / "model"
    for batch in await trial.batches(2):
        await policy.update(batch, LOSS)
        await policy.save(str(folder))
    beside = sorted(each.name for each in folder.parent.iterdir())
    require(beside == ["model"], f"the folder above the saved one has {', '.join(beside)}, not `model` alone")
    expected = (await loaded(policy)).fingerprint()
    for side, again in zip(("own", "plain"), await trial.policies(model=str(folder)), strict=True):
        found = await loaded(again)
        require(found.version == 0, f"a policy of a saved folder begins at version {found.version}")
        require(
            found.fingerprint() == expected,
            f"what the {side} backend loads from the saved folder is not what was saved",
        )
    (trial.folder / "notes.txt").write_text("mine", "utf-8")
    await refused("saving over other files", policy.save(str(trial.folder)), ModelError, str(trial.folder))
    require((trial.folder / "notes.txt").read_text("utf-8") == "mine", "a refused save has changed other files")


async def the_same_bits(trial: Trial) -> None:
    """The same updates from the same weights give the same bits."""
    batches = await trial.batches()
    runs: list[tuple[str, list[dict[str, float]]]] = []
    for _ in range(2):
        policy = await trial.own.policy(micro_batch_tokens=40)
        told = [(await policy.update(batch, LOSS)).means() for batch in batches]
        runs.append(((await loaded(policy)).fingerprint(), told))
    require(runs[0][1] == runs[1][1], f"two runs of three updates tell {runs[0][1]} and {runs[1][1]}")
    require(runs[0][0] == runs[1][0], "two runs of three updates end with other weights")


async def a_cancelled_update(trial: Trial) -> None:
    """A cancelled update makes its whole step or none of it, whenever it is cancelled, and the mesh continues."""
    (batch,) = await trial.batches(1)
    policy, twin = [await trial.own.policy(micro_batch_tokens=24) for _ in range(2)]
    moments = (0.0, 0.3, 0.7)
    prints, told = [(await loaded(twin)).fingerprint()], list[Metrics]()
    seconds = 0.0
    for _ in range(len(moments) + 1):
        began = time.monotonic()
        told.append(await twin.update(batch, LOSS))
        seconds = time.monotonic() - began
        prints.append((await loaded(twin)).fingerprint())
    made = 0
    for moment in moments:
        task = asyncio.ensure_future(policy.update(batch, LOSS))
        await asyncio.sleep(moment * seconds)
        task.cancel()
        await asyncio.wait({task})
        made = await _whole(task, policy, made, prints, f"cancelled after {moment} of its time")
    metrics = await policy.update(batch, LOSS)
    same = metrics.means() == told[made].means()
    require(same, f"the update after cancelled ones returns {metrics}, and that of an undisturbed policy {told[made]}")
    await _whole(None, policy, made + 1, prints, "that came after cancelled ones")


async def _whole(task: "asyncio.Future[Metrics] | None", policy: Policy, made: int, prints: list[str], how: str) -> int:
    """The number of updates after one that must be complete or absent."""
    found = await loaded(policy)
    answered = task is not None and not task.cancelled()
    if task is not None and answered:
        task.result()  # raises the update's error
    may = {made} if task is None else {made + 1} if answered else {made, made + 1}
    require(found.version in may, f"an update {how} leaves version {found.version}, after version {made}")
    same = found.fingerprint() == prints[found.version]
    require(same, f"an update {how} leaves weights that {found.version} updates do not make: it was made in part")
    return found.version


async def calls_at_once(trial: Trial) -> None:
    """Concurrent calls are answered as if one came after the other, in the order of the calls."""
    one, other = await trial.batches(2)
    policy, twin = [await trial.own.policy(micro_batch_tokens=40) for _ in range(2)]

    def calls(asked: Policy) -> list[_Call]:
        return [
            lambda: asked.update(one, LOSS),
            lambda: asked.logprobs(other),
            asked.weights,
            lambda: asked.update(other.select([0]), LOSS),
            lambda: asked.logprobs(one.select([1])),
            lambda: asked.update(one, LOSS),
            asked.weights,
        ]

    together = await asyncio.gather(*(call() for call in calls(policy)))
    alone = [await call() for call in calls(twin)]
    for number, (found, expected) in enumerate(zip(together, alone, strict=True)):
        same = await _bits(found) == await _bits(expected)
        require(same, f"call {number} of {len(alone)} gives {found} among others, and {expected} alone")


async def roles_side_by_side(trial: Trial) -> None:
    """A policy, a critic and a reference that share ranks may be called concurrently. Each answers as it does alone."""
    batch = with_returns((await trial.batches(1))[0], 0)

    async def calls() -> list[_Call]:
        policy, critic, reference = await trial.own.policy(), await trial.own.critic(), await trial.own.reference()
        return [
            lambda: policy.update(batch, LOSS),
            lambda: critic.update(batch, ValueLoss()),
            lambda: reference.logprobs(batch),
            lambda: policy.logprobs(batch),
            lambda: critic.advantages(batch, Gae()),
            policy.weights,
        ]

    together = await asyncio.gather(*(call() for call in await calls()))
    alone = [await call() for call in await calls()]
    for number, (found, expected) in enumerate(zip(together, alone, strict=True)):
        same = await _bits(found) == await _bits(expected)
        require(same, f"call {number} of {len(alone)} gives {found} while other roles run, and {expected} alone")


_Answer: TypeAlias = Metrics | Batch | Weights
_Call: TypeAlias = Callable[[], Coroutine[object, object, _Answer]]


async def _bits(answer: _Answer) -> object:
    """The exact bits of an answer."""
    if isinstance(answer, Metrics):
        return answer.means()
    if isinstance(answer, Weights):
        return answer.version, (await answer.load()).fingerprint()
    whole = await answer.load()
    columns = {name: column for name, column in whole.columns.items() if isinstance(column, Ragged)}
    return {name: (column.values.tobytes(), str(column.source)) for name, column in columns.items()}


POLICY: Final[tuple[Check, ...]] = (
    weights,
    a_new_model,
    a_sampler_takes_the_weights,
    saving,
    the_same_bits,
    a_cancelled_update,
    calls_at_once,
)
"""Checks of a policy's state."""

TOGETHER: Final[tuple[Check, ...]] = (roles_side_by_side,)
"""Checks of a policy, a critic and a reference together."""
