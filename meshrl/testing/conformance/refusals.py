"""Checks of mistakes: each is reported, on any rank, changes nothing, and leaves the mesh usable."""

from typing import Final

import numpy as np

from meshrl.algo import BradleyTerryLoss, ClippedLoss, CrossEntropy, Gae, Loss, ValueLoss
from meshrl.data import Batch, Bucket, Ragged, Source, Weights
from meshrl.errors import DataError, MeshrlError, ModelError
from meshrl.testing.conformance.compare import close, close_metrics, loaded, reference_scores, refused, scores
from meshrl.testing.conformance.material import LOSS, PAIRS, ModelFolders, by_hand, learned_pairs, with_returns
from meshrl.testing.conformance.subject import Check, Trial
from meshrl.testing.invariant_checker import require

_READ: Final = ("tokens", "loss_mask", "rewards", "advantages", "sampler_logprobs")


async def a_row_that_is_too_long(trial: Trial) -> None:
    """A row longer than the model takes is a DataError with both lengths, in `update` and `logprobs`."""
    words = str(trial.model.longest + 1), str(trial.model.longest)
    batch = _with_a_long_row(trial.model, (await trial.batches(1))[0])
    await _refused(trial, DataError, *((batch, LOSS, word) for word in words))
    policy = await trial.own.policy()
    await refused("scoring a row that is too long", policy.logprobs(batch), DataError, *words)
    await trial.standard(policy)


async def nothing_to_learn(trial: Trial) -> None:
    """A batch without a learned token, or without rows, is a DataError."""
    (batch,) = await trial.batches(1)
    silent = _silent(batch)
    await _refused(trial, DataError, *((rows, LOSS, "nothing to learn") for rows in (silent, batch.select([]))))


async def a_first_token_that_is_learned(trial: Trial) -> None:
    """A row whose first token is learned, which nothing predicts, is a DataError."""
    (batch,) = await trial.batches(1)
    mask = np.asarray(batch.loss_mask.values, np.bool_).copy()
    mask[batch.tokens.offsets[4]] = True
    await _refused(trial, DataError, (batch.assign(loss_mask=Ragged(mask, batch.tokens.offsets)), LOSS, "first"))


async def the_loss_of_a_critic(trial: Trial) -> None:
    """A policy refuses a loss of values with a DataError."""
    batch = with_returns((await trial.batches(1))[0], 0)
    await _refused(trial, DataError, (batch, ValueLoss(), "ValueLoss"))


async def log_probs_of_another_model(trial: Trial) -> None:
    """Log-probs of another model than the loss asks for, or of a later version, are a DataError."""
    (batch,) = await trial.batches(1)
    values, offsets = batch.sampler_logprobs.values, batch.tokens.offsets
    strange = batch.assign(sampler_logprobs=Ragged(values, offsets, source=Source("reference")))
    later = batch.assign(logprobs=Ragged(values, offsets, source=Source.trainer(3)))
    anchored = LOSS.model_copy(update={"anchor": "trainer"})
    await _refused(trial, DataError, (strange, LOSS, "reference"), (later, anchored, "version 3"))


async def a_column_that_is_missing(trial: Trial) -> None:
    """A batch without a column of the loss is a DataError, even if ranks without rows do not read the column."""
    (batch,) = await trial.batches(1)
    lacking = batch.drop("advantages")
    await _refused(trial, DataError, *((rows, LOSS, "advantages") for rows in (lacking, lacking.select([0]))))


async def a_column_that_does_not_fit(trial: Trial) -> None:
    """A token column that is shorter than the tokens, in a row on one rank, is a DataError."""
    (batch,) = await trial.batches(1)
    lengths = batch.tokens.lengths.copy()
    lengths[3] -= 1
    short = Ragged.of([np.ones(length) for length in lengths], np.float32)
    await _refused(trial, DataError, (batch.assign(advantages=short), LOSS, "advantages"))


async def a_gradient_that_is_not_finite(trial: Trial) -> None:
    """A gradient that is not finite is a ModelError, and makes no step."""
    (batch,) = await trial.batches(1)
    advantages = batch.row("advantages").copy()
    advantages[3] = np.inf
    await _refused(trial, ModelError, (batch.assign(advantages=advantages), LOSS, "finite"))


async def what_a_critic_refuses(trial: Trial) -> None:
    """A critic refuses rows that are too long, nothing to learn, and a policy's loss, and then continues."""
    own, plain = await trial.critics()
    batch = with_returns((await trial.batches(1))[0], 0)
    long = with_returns(_with_a_long_row(trial.model, batch), 0)
    loss, words = ValueLoss(), (str(trial.model.longest + 1), str(trial.model.longest))
    await refused("a row that is too long", own.update(long, loss), DataError, *words)
    await refused("valuing a row that is too long", own.advantages(long, Gae()), DataError, *words)
    await refused("nothing to learn", own.update(_silent(batch), loss), DataError, "nothing to learn")
    await refused("a policy's loss", own.update(batch, CrossEntropy()), DataError, "CrossEntropy")
    await refused("no returns", own.update(batch.drop("returns").select([0]), loss), DataError, "returns")
    actual, expected = await own.update(batch, loss), await plain.update(batch, loss)
    close_metrics("the critic's update after what it refused", actual, expected, trial.tolerance)


async def weights_that_a_reference_refuses(trial: Trial) -> None:
    """Weights of another model, or damaged in transit, are a ModelError. None of them is taken."""
    plain, reference = await trial.plain.policy(), await trial.own.reference()
    (batch,) = await trial.batches(1)
    await plain.update(batch, LOSS)
    weights = await loaded(plain)
    before = await reference_scores(reference, batch)
    name, array = list(weights.tensors.items())[-1]
    for word, wrong in {
        "strange": Weights(1, {**weights.tensors, "strange": array}),
        "missing": Weights(1, {key: value for key, value in weights.tensors.items() if key != name}),
        f"{list(array[:1].shape)}": Weights(1, {**weights.tensors, name: array[:1]}),
        "float64": Weights(1, {**weights.tensors, name: array.astype(np.float64)}),
        "did not arrive": _damaged(weights),
    }.items():
        await refused(f"a reference's load of weights ({word})", reference.load(wrong), ModelError, word)
        same = np.array_equal(await reference_scores(reference, batch), before)
        require(same, f"weights ({word}) are refused, and yet the reference's log-probs have changed")
    await reference.load(weights)
    actual, expected = await reference_scores(reference, batch), (await scores(plain, batch)).values
    close("a reference with weights after those it refused", actual, expected, trial.tolerance)


async def what_a_reward_model_refuses(trial: Trial) -> None:
    """A policy's loss or a missing column ends an update on all ranks, and changes nothing."""
    model, other = [await trial.own.reward_model() for _ in range(2)]
    batch, loss = await model.encode(PAIRS), BradleyTerryLoss()
    await refused("a policy's loss", model.update(batch, ClippedLoss()), DataError, "this is a reward model")
    await refused("pairs without scores", model.update(batch, loss), DataError, "token_scores")
    actual, expected = [
        ((await learned_pairs(each, PAIRS, loss)).means(), (await (await each.score(PAIRS)).load()).rewards.tolist())
        for each in (model, other)
    ]
    require(actual == expected, "the update after a refused one is not that of an undisturbed reward model")


def _damaged(weights: Weights) -> Weights:
    """The same weights with a changed byte in the last tensor and the old fingerprints."""
    *first, last = weights.buckets
    memory = last.memory.copy()
    memory[max(entry.start for entry in last.index.values())] ^= 1
    memory.flags.writeable = False
    return Weights.of(weights.version, [*first, Bucket(last.index, last.nbytes, memory)])


async def _refused(trial: Trial, kind: type[MeshrlError], *updates: tuple[Batch, Loss, str]) -> None:
    """Require that updates are refused with a word, and that the policy's next one is as if they had not been made."""
    policy = await trial.own.policy()
    before = await loaded(policy)
    for batch, loss, word in updates:
        await refused(f"an update of {len(batch)} rows", policy.update(batch, loss), kind, word)
        same = await loaded(policy) == before
        require(same, "an update is refused, and yet the weights or their version have changed")
    await trial.standard(policy)


def _silent(batch: Batch) -> Batch:
    return batch.assign(loss_mask=Ragged(np.zeros(len(batch.tokens.values), np.bool_), batch.tokens.offsets))


def _with_a_long_row(model: ModelFolders, batch: Batch) -> Batch:
    row = by_hand(model, [(model.longest + 1, 4)]).only(*_READ)
    return Batch.concat([batch.only(*_READ), row])


POLICY: Final[tuple[Check, ...]] = (
    a_row_that_is_too_long,
    nothing_to_learn,
    a_first_token_that_is_learned,
    the_loss_of_a_critic,
    log_probs_of_another_model,
    a_column_that_is_missing,
    a_column_that_does_not_fit,
    a_gradient_that_is_not_finite,
)
CRITIC: Final[tuple[Check, ...]] = (what_a_critic_refuses,)
REFERENCE: Final[tuple[Check, ...]] = (weights_that_a_reference_refuses,)
REWARD_MODEL: Final[tuple[Check, ...]] = (what_a_reward_model_refuses,)
