"""Checks of numbers: equal to the plain backend's, however the rows are divided."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshrl.algo import (
    BradleyTerryLoss,
    ClippedLoss,
    Correction,
    CrossEntropy,
    Gae,
    Loss,
    PreferenceLoss,
    ProcessLoss,
    ValueLoss,
    with_labels,
)
from meshrl.data import Batch, Metrics, Ragged
from meshrl.roles import Critic, LoraConfig, Policy, Reference, RewardModel
from meshrl.testing.conformance.compare import (
    close,
    close_columns,
    close_metrics,
    close_tensors,
    close_weights,
    equal,
    loaded,
    reference_scores,
    scores,
)
from meshrl.testing.conformance.material import (
    LOSS,
    PAIRS,
    STEPS,
    TEXTS,
    by_hand,
    learned_pairs,
    tensors_of,
    with_returns,
)
from meshrl.testing.conformance.subject import Check, Trial
from meshrl.testing.invariant_checker import require

_LOSSES: Final[dict[str, Loss]] = {
    "clipped_loss_by_token_mean": ClippedLoss(),
    "clipped_loss_by_sequence_mean": ClippedLoss(normalise="sequence-mean", clip_high=0.3, dual_clip=3),
    "clipped_loss_by_a_constant": ClippedLoss(normalise="constant", constant=9),
    "clipped_loss_with_a_reference": ClippedLoss(kl=0.1),
    "clipped_loss_with_a_correction": ClippedLoss(anchor="trainer", correction=Correction(level="sequence", high=1.5)),
    "cross_entropy": CrossEntropy(),
    "preference_loss": PreferenceLoss(beta=0.5),
}


_SCORED: Final = (PAIRS, PAIRS.select([1]), PAIRS.select([]), STEPS)


def _updates(name: str, loss: Loss) -> Check:
    async def check(trial: Trial) -> None:
        policies = await trial.policies(micro_batch_tokens=64)
        for number, batch in enumerate(await trial.batches()):
            await _same_update(f"update {number}", trial, policies, batch, loss)
        await _same_weights("after three updates", trial, policies)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Three updates by {loss!r} give the plain backend's metrics and weights."
    return check


async def token_advantages(trial: Trial) -> None:
    """A loss may read advantages of tokens if rows have them: the update is the plain backend's."""
    policies = await trial.policies()
    (batch,) = await trial.batches(1)
    values = np.random.default_rng(9).normal(size=len(batch.tokens.values)).astype(np.float32)
    batch = batch.assign(advantages=Ragged(values, batch.tokens.offsets))
    await _same_update("the update", trial, policies, batch, LOSS)
    await _same_weights("after it", trial, policies)


async def low_rank_adapters(trial: Trial) -> None:
    """Adapters start and learn like the plain backend's: the metrics of two updates, and the merged weights."""
    policies = await trial.policies(lora={"rank": 4, "alpha": 8})
    for number, batch in enumerate(await trial.batches(2)):
        await _same_update(f"update {number} of adapters", trial, policies, batch, LOSS)
    await _same_weights("after two updates of adapters", trial, policies)


_OF_A_STEP: Final = ("loss", "grad_norm", "lr", "rows", "tokens", "entropy", "ratio")
"""Metrics of an update by LOSS."""


async def named_adapters(trial: Trial) -> None:
    """Adapters that share a base and its passes learn what each learns alone on the plain backend, also an added one.

    So do two whose rows come in two calls, and one that continues from the checkpoint of another.
    """
    tables = {
        "first": LoraConfig(rank=4, alpha=8, sync="adapters"),
        "second": LoraConfig(rank=2, alpha=6, targets=("q_proj", "down_proj", "embed_tokens"), seed=3, sync="adapters"),
    }
    own = await trial.own.policy(adapters={"first": tables["first"]}, share_passes=True, micro_batch_tokens=64)
    await own.add_adapter("second", tables["second"])
    plain = {name: await trial.plain.policy(lora=lora, micro_batch_tokens=64) for name, lora in tables.items()}
    names = np.array([*tables])[np.arange(14) % 3 // 2]
    for number, batch in enumerate(await trial.batches(2)):
        named = batch.assign(adapter=names.tolist())
        if number:
            for part in (range(9), range(9, 14)):
                await own.forward_backward(named.select(list(part)), LOSS)
            found = {name: await own.step(adapter=name) for name in tables}
        else:
            both = await own.update(named, LOSS)
            found = {name: Metrics({key: both.entries[f"{name}/{key}"] for key in _OF_A_STEP}) for name in tables}
        for name, policy in plain.items():
            expected = await policy.update(batch.select(np.flatnonzero(names == name)), LOSS)
            for key in _OF_A_STEP:
                what = f"update {number} of {name}: `{key}`"
                close(what, np.array(found[name][key]), np.array(expected[key]), trial.tolerance)
            trained = await (await own.weights(name)).load()
            close_weights(f"after update {number} of {name}", trained, await loaded(policy), trial.tolerance)
    state = str(trial.folder / "one adapter")
    await own.checkpoint(state, adapter="second")
    await own.drop_adapter("second")
    await own.add_adapter("third", tables["second"])
    await own.restore(state, adapter="third")
    equal("the adapters", await own.adapters(), {"first": 2, "third": 2})
    restored = await (await own.weights("third")).load()
    close_weights("after a restore", restored, await loaded(plain["second"]), trial.tolerance)


async def micro_batches(trial: Trial) -> None:
    """The step does not depend on `micro_batch_tokens`, nor on activation checkpointing."""
    (batch,) = await trial.batches(1)
    plain = await trial.plain.policy()
    expected = await plain.update(batch, LOSS)
    for keys in ({"micro_batch_tokens": 1000}, {"micro_batch_tokens": 20}, {"activation_checkpointing": True}):
        policy = await trial.own.policy(**keys)
        close_metrics(f"the update with {keys}", await policy.update(batch, LOSS), expected, trial.tolerance)
        close_weights(f"the update with {keys}", await loaded(policy), await loaded(plain), trial.tolerance)


async def the_order_of_rows(trial: Trial) -> None:
    """A step does not depend on the order of the rows, and log-probs keep that order."""
    own, plain = policies = await trial.policies(micro_batch_tokens=40)
    (batch,) = await trial.batches(1)
    order = np.random.default_rng(3).permutation(len(batch))
    expected = (await plain.logprobs(batch)).select(order)
    actual = await own.logprobs(batch.select(order))
    close_columns("rows in another order", await actual.load(), expected, ("logprobs",), trial.tolerance)
    metrics = await own.update(batch.select(order), LOSS)
    close_metrics("rows in another order", metrics, await plain.update(batch, LOSS), trial.tolerance)
    await _same_weights("after rows in another order", trial, policies)


async def rows_that_teach_nothing(trial: Trial) -> None:
    """Rows without a learned token, which are only a prompt, change no weight, whatever normalises the loss."""
    (batch,) = await trial.batches(1)
    silent = by_hand(trial.model, [(1, 0), (0, 0), (17, 0), (5, 0)])
    columns = ("tokens", "loss_mask", "advantages", "sampler_logprobs")
    whole = Batch.concat([silent.only(*columns), batch.only(*columns), silent.only(*columns)])
    policies = await trial.policies(micro_batch_tokens=40)
    for name in ("clipped_loss_by_token_mean", "clipped_loss_by_sequence_mean", "clipped_loss_by_a_constant"):
        actual = await policies[0].update(whole, _LOSSES[name])
        expected = await policies[1].update(batch.only(*columns), _LOSSES[name])
        what = f"{name}, with rows that teach nothing"
        for metric in ("loss", "grad_norm"):
            one, other = np.array(actual[metric]), np.array(expected[metric])
            close(f"{what}: `{metric}`", one, other, trial.tolerance)
        await _same_weights(what, trial, policies)


async def uneven_rows(trial: Trial) -> None:
    """Any number of rows works on any number of ranks: five, two, and one, which leaves ranks idle."""
    policies = await trial.policies(micro_batch_tokens=16)
    (batch,) = await trial.batches(1)
    for rows in ([0, 1, 2, 3, 4], [5, 6], [7], [8, 9, 10]):
        await _same_update(f"an update of {len(rows)} rows", trial, policies, batch.select(rows), LOSS)
    await _same_weights("after updates of 5, 2, 1 and 3 rows", trial, policies)


async def short_and_long_rows(trial: Trial) -> None:
    """Rows may have no token, one, more than `micro_batch_tokens`, or as many as the model takes.

    Ranks share their floating-point operations.
    """
    policies = await trial.policies(micro_batch_tokens=4, balance="flops")
    longest = trial.model.longest
    shapes = [(1, 0), (longest, longest - 1), (0, 0), (9, 1), (2, 1), (3, 2), (longest, 1)]
    batch = by_hand(trial.model, shapes)
    await _same_scores("such rows", trial, policies, batch)
    for rows in ([*range(len(shapes))], [1], [0, 2, 4]):
        what = f"rows of {[shapes[row][0] for row in rows]} tokens"
        await _same_update(what, trial, policies, batch.select(rows), LOSS)
    await _same_weights("after such rows", trial, policies)


async def log_probs(trial: Trial) -> None:
    """`logprobs` are the plain backend's: with and without a temperature or a mask, before and after an update."""
    policies = await trial.policies(micro_batch_tokens=40)
    batch, other = await trial.batches(2)
    await _same_scores("log-probs", trial, policies, batch)
    await _same_scores("log-probs without a mask", trial, policies, batch.only("tokens"))
    await _same_scores("log-probs of one row", trial, policies, batch.drop("temperature").select([3]))
    await _same_scores("log-probs of no rows", trial, policies, batch.select([]))
    await _same_update("an update", trial, policies, batch, LOSS)
    await _same_scores("log-probs after an update", trial, policies, other)


async def reference_log_probs(trial: Trial) -> None:
    """`Reference.logprobs` are the plain backend's."""
    own, plain = await trial.own.reference(micro_batch_tokens=40), await trial.plain.reference()
    (batch,) = await trial.batches(1)
    for rows in ([*range(len(batch))], [2], []):
        some = batch.only("tokens", "loss_mask", "temperature").select(rows)
        actual, expected = await (await own.logprobs(some)).load(), await plain.logprobs(some)
        close_columns(f"a reference of {len(rows)} rows", actual, expected, ("reference_logprobs",), trial.tolerance)


async def a_reference_takes_weights(trial: Trial) -> None:
    """A reference that loaded a policy's weights, of either backend, gives the policy's log-probs, and keeps them."""
    own, plain = await trial.policies()
    reference = await trial.own.reference(micro_batch_tokens=40)
    one, other = await trial.batches(2)
    for policy in (own, plain):
        await policy.update(one, LOSS)
    await reference.load(await own.weights())
    await _scores_as("a reference with its own backend's weights", trial, reference, plain)
    frozen = await reference_scores(reference, other)
    await own.update(other, LOSS)
    again = await reference_scores(reference, other)
    require(np.array_equal(frozen, again), "an update of the policy changed a reference that had taken its weights")
    await plain.update(other, LOSS)
    await reference.load(await loaded(plain))
    await _scores_as("a reference with the plain backend's weights", trial, reference, plain)


async def _scores_as(what: str, trial: Trial, reference: Reference, plain: Policy) -> None:
    (batch,) = await trial.batches(1)
    actual, expected = await reference_scores(reference, batch), (await scores(plain, batch)).values
    close(f"{what}: `reference_logprobs`", actual, expected, trial.tolerance)


async def encoding(trial: Trial) -> None:
    """`encode` returns the plain backend's tokens and mask, in the order of the rows."""
    batch = Batch.of(prompt=["b", "abc>", "a>", "hg", "c"], completion=["", *TEXTS])
    await _same_encodings(await trial.policies(), (batch, batch.select([1]), batch.select([])))


async def reward_model_encodings(trial: Trial) -> None:
    """`encode` returns the plain backend's tokens and mask, of pairs and of steps, in the order of the rows."""
    await _same_encodings(await trial.reward_models(), _SCORED)


async def _same_encodings(
    models: tuple[Policy, Policy] | tuple[RewardModel, RewardModel], batches: Sequence[Batch]
) -> None:
    own, plain = models
    for rows in batches:
        actual, expected = await (await own.encode(rows)).load(), await plain.encode(rows)
        for name in ("tokens", "loss_mask"):
            one, other = ([each.tolist() for each in side.ragged(name)] for side in (actual, expected))
            require(one == other, f"`{name}` of {len(rows)} rows is {one}, and the plain backend's {other}")


async def critic_values(trial: Trial) -> None:
    """`Critic.advantages` are the plain backend's values, advantages and returns."""
    critics = await trial.critics(micro_batch_tokens=40)
    (batch,) = await trial.batches(1)
    for rows in ([*range(len(batch))], [2], []):
        await _same_values(f"a critic of {len(rows)} rows", trial, critics, batch.select(rows))


async def critic_updates(trial: Trial) -> None:
    """Three updates of a critic give the plain backend's metrics, values and saved weights, including its head's."""
    own, plain = critics = await trial.critics(micro_batch_tokens=40)
    batches = [with_returns(batch, seed) for seed, batch in enumerate(await trial.batches())]
    batches[1] = batches[1].select([0, 1, 2, 3, 4])
    for number, (batch, clip) in enumerate(zip(batches, (None, 0.5, 0.5), strict=True)):
        loss = ValueLoss(clip=clip)
        actual, expected = await own.update(batch, loss), await plain.update(batch, loss)
        close_metrics(f"update {number} of the critic", actual, expected, trial.tolerance)
    await _same_values("the critic after three updates", trial, critics, batches[0])
    again = await trial.plain.critic(model=await _same_saved("critic", trial, critics))
    await _same_values("a critic of the saved folder", trial, (own, again), batches[0])


async def reward_model_updates(trial: Trial) -> None:
    """Four updates of pairs and steps give the plain backend's metrics, scores and weights. The saved folder scores."""
    models = await trial.reward_models(micro_batch_tokens=20)
    await _same_rewards("a new reward model", trial, models)
    for number, rows in enumerate(([*range(10)], [2, 3], [*range(10)])):
        loss = BradleyTerryLoss(centre=0.1 * number)
        actual, expected = [await learned_pairs(model, PAIRS.select(rows), loss) for model in models]
        close_metrics(f"update {number} of the reward model", actual, expected, trial.tolerance)
    actual, expected = [
        await model.update(await with_labels(await model.encode(STEPS)), ProcessLoss()) for model in models
    ]
    close_metrics("an update of steps", actual, expected, trial.tolerance)
    await _same_rewards("the reward model after four updates", trial, models)
    again = await trial.plain.reward_model(model=await _same_saved("reward model", trial, models))
    await _same_rewards("a reward model of the saved folder", trial, (models[0], again))


async def _same_saved(name: str, trial: Trial, models: tuple[Critic, Critic] | tuple[RewardModel, RewardModel]) -> str:
    """Save both models, require the same tensors, and return the folder of the first."""
    own, plain = models
    folders = [trial.folder / "own", trial.folder / "plain"]
    await own.save(str(folders[0]))
    await plain.save(str(folders[1]))
    close_tensors(f"the saved {name}", tensors_of(folders[0]), tensors_of(folders[1]), trial.tolerance)
    return str(folders[0])


async def _same_update(what: str, trial: Trial, policies: tuple[Policy, Policy], batch: Batch, loss: Loss) -> None:
    actual, expected = [await policy.update(batch, loss) for policy in policies]
    close_metrics(what, actual, expected, trial.tolerance)


async def _same_weights(what: str, trial: Trial, policies: tuple[Policy, Policy]) -> None:
    actual, expected = [await loaded(policy) for policy in policies]
    close_weights(what, actual, expected, trial.tolerance)


async def _same_scores(what: str, trial: Trial, policies: tuple[Policy, Policy], batch: Batch) -> None:
    actual, expected = [await (await policy.logprobs(batch)).load() for policy in policies]
    close_columns(what, actual, expected, ("logprobs",), trial.tolerance)


async def _same_values(what: str, trial: Trial, critics: tuple[Critic, Critic], batch: Batch) -> None:
    actual, expected = [await (await critic.advantages(batch, Gae(decay=0.9))).load() for critic in critics]
    close_columns(what, actual, expected, ("values", "advantages", "returns"), trial.tolerance)


async def _same_rewards(what: str, trial: Trial, models: tuple[RewardModel, RewardModel]) -> None:
    for batch in _SCORED:
        actual, expected = [await (await model.token_scores(await model.encode(batch))).load() for model in models]
        close_columns(f"{what}, {len(batch)} rows", actual, expected, ("token_scores",), trial.tolerance)
    own, plain = [(await (await model.score(PAIRS)).load("rewards")).rewards for model in models]
    close(f"{what}: `rewards`", own, plain, trial.tolerance)


POLICY: Final[tuple[Check, ...]] = (
    *(_updates(name, loss) for name, loss in _LOSSES.items()),
    token_advantages,
    micro_batches,
    the_order_of_rows,
    rows_that_teach_nothing,
    uneven_rows,
    short_and_long_rows,
    log_probs,
    encoding,
)
ADAPTERS: Final[tuple[Check, ...]] = (low_rank_adapters, named_adapters)
CRITIC: Final[tuple[Check, ...]] = (critic_values, critic_updates)
REFERENCE: Final[tuple[Check, ...]] = (reference_log_probs, a_reference_takes_weights)
REWARD_MODEL: Final[tuple[Check, ...]] = (reward_model_encodings, reward_model_updates)
