"""Checks of state: weights and their version, saved files, the order of calls, and checkpoints."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, TypeAlias, TypeVar

from meshrl.algo import BradleyTerryLoss, Gae, ValueLoss
from meshrl.data import Batch, Metrics, Ragged, Weights
from meshrl.errors import MeshrlError, ModelError, RankDied
from meshrl.mesh import Actor, at, endpoint, ranks, respawn
from meshrl.roles import Critic, Policy, RewardModel, Sampling, Stateful
from meshrl.testing.conformance.compare import alike, equal, loaded, refused
from meshrl.testing.conformance.material import LOSS, PAIRS, SMALL, TEXTS, learned_pairs, with_returns
from meshrl.testing.conformance.samples import learned, rest, same_log_probs
from meshrl.testing.conformance.subject import OPTIMIZER, Check, Trial, update_result
from meshrl.testing.invariant_checker import require

M = TypeVar("M", bound=Stateful)

_SCHEDULED: Final = OPTIMIZER.model_copy(update={"schedule": "cosine", "total_steps": 6})


async def weights(trial: Trial) -> None:
    """`weights` has the plain backend's names, shapes and dtypes, in bfloat16 too, and its version counts updates."""
    (batch,) = await trial.batches(1)
    for dtype in ("float32", "bfloat16"):
        own, plain = await trial.policies(dtype=dtype)
        actual, expected = await loaded(own), await loaded(plain)
        alike(f"the weights in {dtype}", actual.tensors, expected.tensors)
        require(actual == expected, f"weights in {dtype} that were never updated are not those of the model's folder")
        await own.update(batch, LOSS)
        once = await loaded(own)
        await own.update(batch, LOSS)
        twice = await loaded(own)
        moments = "before, between and after two updates"
        equal(f"{moments}, the list of versions", [each.version for each in (actual, once, twice)], [0, 1, 2])
        prints = {each.fingerprint() for each in (actual, once, twice)}
        require(len(prints) == 3, f"of the weights {moments} only {len(prints)} differ")


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
    rollouts = await rest(sampler.generate(prompts, Sampling(n=4, max_tokens=8)))
    equal("the version of tokens after two updates", set(rollouts.versions.values[learned(rollouts)].tolist()), {2})
    await same_log_probs("the policy's log-probs of what was sampled", policy, rollouts)


async def saving(trial: Trial) -> None:
    """A saved folder has the weights of that moment, for either backend. It replaces a model, but no other files."""
    policy = await trial.own.policy()
    folder = trial.folder / "deeper" / "model"
    for batch in await trial.batches(2):
        await policy.update(batch, LOSS)
        await policy.save(str(folder))
    equal("what is in the folder above the saved one", [each.name for each in folder.parent.iterdir()], ["model"])
    expected = (await loaded(policy)).fingerprint()
    for side, again in zip(("own", "plain"), await trial.policies(model=str(folder)), strict=True):
        actual = await loaded(again)
        equal("the version at which a policy of a saved folder begins", actual.version, 0)
        same = actual.fingerprint() == expected
        require(same, f"what the {side} backend loads from the saved folder is not what was saved")
    (trial.folder / "notes.txt").write_text("mine", "utf-8")
    await refused("saving over other files", policy.save(str(trial.folder)), ModelError, str(trial.folder))
    equal("another file after a refused save", (trial.folder / "notes.txt").read_text("utf-8"), "mine")


async def the_same_bits(trial: Trial) -> None:
    """The same updates from the same weights give the same bits."""
    batches = await trial.batches()
    runs: list[tuple[str, list[dict[str, float]]]] = []
    for _ in range(2):
        policy = await trial.own.policy(micro_batch_tokens=40)
        metrics = [(await policy.update(batch, LOSS)).means() for batch in batches]
        runs.append(((await loaded(policy)).fingerprint(), metrics))
    equal("the list of metrics of three updates, in a second run,", runs[1][1], runs[0][1])
    require(runs[0][0] == runs[1][0], "two runs of three updates end with other weights")


async def a_cancelled_update(trial: Trial) -> None:
    """A cancelled update makes its whole step or none of it, whenever it is cancelled, and the mesh continues."""
    (batch,) = await trial.batches(1)
    policy, twin = [await trial.own.policy(micro_batch_tokens=24) for _ in range(2)]
    moments = (0.0, 0.3, 0.7)
    prints, undisturbed = [(await loaded(twin)).fingerprint()], list[dict[str, float]]()
    seconds = 0.0
    for _ in range(len(moments) + 1):
        began = time.monotonic()
        metrics = await twin.update(batch, LOSS)
        seconds = time.monotonic() - began
        undisturbed.append(metrics.means())
        prints.append((await loaded(twin)).fingerprint())
    count = 0
    for moment in moments:
        task = asyncio.ensure_future(policy.update(batch, LOSS))
        await asyncio.sleep(moment * seconds)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()  # raises the update's error
        how = f"an update cancelled after {moment} of its time leaves"
        weights = await loaded(policy)
        possible = {count, count + 1} if task.cancelled() else {count + 1}
        require(weights.version in possible, f"{how} version {weights.version}, after version {count}")
        count = weights.version
        same = weights.fingerprint() == prints[count]
        require(same, f"{how} weights that {count} updates do not make: it was made in part")
    expected = undisturbed[count], count + 1, prints[count + 1]
    equal("the update after cancelled ones", await update_result(policy, batch), expected)


async def calls_at_once(trial: Trial) -> None:
    """Concurrent calls are answered as if one came after the other, in the order of the calls."""
    one, other = await trial.batches(2)
    policy, twin = [await trial.own.policy(micro_batch_tokens=40) for _ in range(2)]

    def calls(called: Policy) -> list[_Call]:
        return [
            lambda: called.update(one, LOSS),
            lambda: called.logprobs(other),
            called.weights,
            lambda: called.update(other.select([0]), LOSS),
            lambda: called.logprobs(one.select([1])),
            lambda: called.update(one, LOSS),
            called.weights,
        ]

    await _same_answers("among others", calls(policy), calls(twin))


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

    await _same_answers("while other roles run", await calls(), await calls())


async def _same_answers(how: str, together: "Sequence[_Call]", alone: "Sequence[_Call]") -> None:
    """Require that calls at once give the same bits as calls one after the other."""
    answers = await asyncio.gather(*(call() for call in together))
    expected = [await call() for call in alone]
    for number, (actual, wanted) in enumerate(zip(answers, expected, strict=True)):
        same = await _bits(actual) == await _bits(wanted)
        require(same, f"call {number} of {len(alone)} gives {actual} {how}, and {wanted} alone")


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


async def a_policy_goes_on(trial: Trial) -> None:
    """A restored policy continues bit for bit: weights, version, moments and learning rate. So does one in use."""
    first, second, *remaining = await trial.batches(4)
    policy = await trial.own.policy(optimizer=_SCHEDULED)
    for batch in (first, second):
        await policy.update(batch, LOSS)
    folder = str(trial.folder / "state")
    await policy.checkpoint(folder)
    saved = await loaded(policy)
    expected = [await update_result(policy, batch) for batch in remaining]
    fresh, used = [await trial.own.policy(optimizer=_SCHEDULED) for _ in range(2)]
    await used.update(remaining[1], LOSS)
    for which, again in (("fresh", fresh), ("used", used)):
        await again.restore(folder)
        same = await loaded(again) == saved
        require(same, f"a {which} policy that is restored has not the weights of the checkpoint")
        actual = [await update_result(again, batch) for batch in remaining]
        equal(f"the updates of a restored {which} policy", actual, expected)


async def a_critic_goes_on(trial: Trial) -> None:
    """A restored critic continues bit for bit. A policy refuses its checkpoint, and is unchanged."""
    batches = [with_returns(batch, seed) for seed, batch in enumerate(await trial.batches())]

    async def step(critic: Critic, number: int) -> object:
        metrics = await critic.update(batches[number], ValueLoss())
        valued = await (await critic.advantages(batches[number], Gae())).load("values")
        return metrics.means(), valued.ragged("values").values.tobytes()

    await _restored("critic", trial, lambda: trial.own.critic(optimizer=_SCHEDULED), step)


async def a_reward_model_goes_on(trial: Trial) -> None:
    """A restored reward model continues bit for bit. A policy refuses its checkpoint, and is unchanged."""

    async def step(model: RewardModel, _: int) -> object:
        metrics = await learned_pairs(model, PAIRS, BradleyTerryLoss())
        scored = await (await model.score(PAIRS)).load("rewards")
        return metrics.means(), scored.rewards.tobytes()

    await _restored("reward model", trial, lambda: trial.own.reward_model(optimizer=_SCHEDULED), step)


async def _restored(
    name: str, trial: Trial, make: Callable[[], Awaitable[M]], step: Callable[[M, int], Awaitable[object]]
) -> None:
    """Require that the third step of a model is the same after a checkpoint, which a policy refuses."""
    model = await make()
    for number in range(2):
        await step(model, number)
    folder = str(trial.folder / "state")
    await model.checkpoint(folder)
    expected = await step(model, 2)
    again = await make()
    await again.restore(folder)
    require(await step(again, 2) == expected, f"a restored {name} continues with other numbers than one that was not")
    policy = await trial.own.policy()
    await refused(f"the checkpoint of a {name}", policy.restore(folder), MeshrlError, folder)
    await trial.standard(policy)


async def a_policy_made_again(trial: Trial) -> None:
    """A policy that was respawned and restored continues bit for bit.

    If ranks are processes, one of them was killed before.
    """
    one, other = await trial.batches(2)
    policy = await trial.own.policy()
    await policy.update(one, LOSS)
    folder = str(trial.folder / "state")
    await policy.checkpoint(folder)
    expected = await update_result(policy, other)
    if trial.harness.subject.engine != "local":
        killer = await trial.own.spawn(_Killer)
        await refused("being killed", at(killer, **ranks(killer)[-1].axes).kill(), RankDied)
        await refused("an update after a death", policy.update(other, LOSS), RankDied)
    await respawn(policy)
    equal("the version of a policy that is made again", (await loaded(policy)).version, 0)
    await policy.restore(folder)
    equal("the update of a policy that is made again and restored", await update_result(policy, other), expected)


class _Killer(Actor):
    @endpoint
    async def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


POLICY: Final[tuple[Check, ...]] = (
    weights,
    a_new_model,
    a_sampler_takes_the_weights,
    saving,
    the_same_bits,
    a_cancelled_update,
    calls_at_once,
    a_policy_goes_on,
    a_policy_made_again,
)
CRITIC: Final[tuple[Check, ...]] = (a_critic_goes_on,)
REWARD_MODEL: Final[tuple[Check, ...]] = (a_reward_model_goes_on,)
TOGETHER: Final[tuple[Check, ...]] = (roles_side_by_side,)
