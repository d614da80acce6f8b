"""Checks of a step in two halves: gradients that are added by several calls, and what waits for the step."""

from typing import Final

import numpy as np

from meshrl.algo import CrossEntropy, Loss, ValueLoss
from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.roles import Policy, Step
from meshrl.testing.conformance.compare import close, close_metrics, close_weights, equal, loaded, refused, scores
from meshrl.testing.conformance.material import LOSS, with_returns
from meshrl.testing.conformance.subject import OPTIMIZER, Check, Trial, update_result
from meshrl.testing.invariant_checker import require

_NORMALISED: Final = [LOSS.model_copy(update={"normalise": each}) for each in ("sequence-mean", "sequence-sum", "sum")]
_CHOSEN: Final = Step(lr=0.02, betas=(0.5, 0.9), eps=0.02, weight_decay=0.2, max_grad_norm=np.inf)


async def any_number_of_calls(trial: Trial) -> None:
    """Rows that are divided over calls of `forward_backward` in any way make the plain backend's update of all."""
    batches, random = await trial.batches(), np.random.default_rng(len(trial.subject.axes))
    own, plain = policies = await trial.policies(micro_batch_tokens=int(random.integers(16, 60)))
    for batch, loss in zip((*batches, batches[0]), (LOSS, *_NORMALISED), strict=True):
        what = f"a step by {loss.normalise}"
        scored = await scores(plain, batch)
        order = random.permutation(len(batch))
        for rows in np.split(order, np.sort(random.choice(np.arange(1, len(batch)), 2, replace=False))):
            part = batch.select(rows)
            result = await (await own.forward_backward(part, loss)).load()
            mask = np.asarray(part.loss_mask.values, np.bool_)
            actual, expected = result.rows.ragged("logprobs"), scored.select(rows).values
            equal(f"{what}: the source of `logprobs`", actual.source, scored.source)
            close(f"{what}: `logprobs`", actual.values, np.where(mask, expected, 0), trial.tolerance)
            if loss.normalise == "sum":
                losses = result.rows.ragged("losses").values.sum()
                close(f"{what}: the sum of `losses`", losses, np.array(result.metrics["loss"]), trial.tolerance)
        close_metrics(what, await own.step(), await plain.update(batch, loss), trial.tolerance)
        await _same_weights(f"after {what}", trial, policies)
    both: list[tuple[Batch, Loss]] = [(batches[1], LOSS), (batches[2], CrossEntropy())]
    for policy, parts in ((own, both), (plain, both[::-1])):
        for part, by in parts:
            await policy.forward_backward(part, by)
    close_metrics("a step by two losses", await own.step(), await plain.step(), trial.tolerance)
    await _same_weights("after a step by two losses", trial, policies)


async def an_update_in_halves(trial: Trial) -> None:
    """The halves make the update bit for bit. Between them, what is refused, read or scored changes nothing."""
    one, other = await trial.batches(2)
    policy, twin, fresh, tabled = [await trial.own.policy(optimizer=each) for each in (*[OPTIMIZER] * 3, _table())]
    folder = str(trial.folder / "state")
    await fresh.checkpoint(folder)
    before = await loaded(policy), (await scores(policy, other)).values.tobytes()
    await refused("a step without gradients", policy.step(), DataError, "forward_backward")
    await policy.forward_backward(one, LOSS)
    await refused("a checkpoint between the halves", policy.checkpoint(folder), DataError, "step")
    wrong = policy.forward_backward(with_returns(one, 0), ValueLoss())
    await refused("a critic's loss", wrong, DataError, "ValueLoss")
    mixed = policy.forward_backward(other, _NORMALISED[0])
    await refused("a loss that is normalised otherwise", mixed, DataError, "sequence-mean", "token-mean")
    now = await loaded(policy), (await scores(policy, other)).values.tobytes()
    require(now == before, "the weights or the log-probs between the halves are not those before the step")
    await _same_step("a step", policy, twin, one)

    await policy.forward_backward(other, LOSS)
    await policy.restore(folder)
    await refused("a step with gradients from before a checkpoint was loaded", policy.step(), DataError)
    await policy.forward_backward(one, LOSS)
    await _same_step("a step with values of its own", policy, tabled, one, _CHOSEN)


def _table() -> object:
    values = {**_CHOSEN.model_dump(), "warmup_steps": 0, "max_grad_norm": None}
    return OPTIMIZER.model_copy(update=values)


async def _same_step(what: str, policy: Policy, twin: Policy, batch: Batch, chosen: Step | None = None) -> None:
    metrics = await policy.step(chosen)
    weights = await loaded(policy)
    actual = metrics.means(), weights.version, weights.fingerprint()
    equal(f"{what} after `forward_backward`", actual, await update_result(twin, batch))


async def _same_weights(what: str, trial: Trial, policies: tuple[Policy, Policy]) -> None:
    actual, expected = [await loaded(policy) for policy in policies]
    close_weights(what, actual, expected, trial.tolerance)


POLICY: Final[tuple[Check, ...]] = (any_number_of_calls, an_update_in_halves)
