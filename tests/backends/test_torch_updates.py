"""Updates of the torch policy that fail, are refused or are cancelled: none leaves anything behind."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from torch import Tensor

from meshrl import Batch, ClippedLoss, CrossEntropy, NewModel, PolicyConfig, Ragged, ValueLoss
from meshrl.errors import DataError, ModelError
from meshrl.losses import Normalise, Predicts, TokenLoss
from meshrl_torch.policy import TorchPolicy

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


def policy(**changes: object) -> TorchPolicy:
    return TorchPolicy(PolicyConfig.model_validate({"model": MODEL, **changes}))


def rollouts(rows: int = 14, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 17, rows)
    tokens = Ragged.of([rng.integers(2, 11, length) for length in lengths], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged.of([np.arange(length) >= length // 2 for length in lengths], np.bool_),
        sampler_logprobs=Ragged(rng.normal(-2, 0.3, len(tokens.values)).astype(np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


@dataclass(frozen=True)
class Broken:
    predicts: Predicts = "logprobs"
    normalise: Normalise = "token-mean"
    constant: None = None
    columns: tuple[str, ...] = ()

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(logprobs / 0, {})


async def test_a_gradient_that_is_not_finite_makes_no_step() -> None:
    trainer = policy()
    before = (await trainer.weights()).fingerprint()
    with pytest.raises(ModelError, match=r"step 0 is not finite: its norm is (nan|inf)"):
        await trainer.update(rollouts(), Broken())
    assert (await trainer.weights()).fingerprint() == before
    await trainer.update(rollouts(), ClippedLoss())


@dataclass(frozen=True)
class Late(Broken):
    """Fails after the first micro-batch has left its gradient."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        self.calls.append(1)
        if len(self.calls) == 2:
            raise ZeroDivisionError
        return TokenLoss(-logprobs, {})


async def test_an_update_that_failed_leaves_nothing_to_the_next() -> None:
    failed, fresh = policy(micro_batch_tokens=40), policy(micro_batch_tokens=40)
    with pytest.raises(ZeroDivisionError):
        await failed.update(rollouts(), Late())
    for trainer in (failed, fresh):
        await trainer.update(rollouts(), ClippedLoss())
    assert (await failed.weights()) == (await fresh.weights())


@dataclass(frozen=True)
class Named(Broken):
    """Has a metric of this name."""

    name: str = "loss"

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(-logprobs, {self.name: logprobs.detach()})


@pytest.mark.parametrize("name", ["loss", "grad_norm", "lr", "rows", "tokens"])
async def test_a_metric_of_the_updates_own_name_is_refused_before_the_step(name: str) -> None:
    trainer = policy()
    with pytest.raises(DataError, match=f"Named names a metric `{name}`, which every update reports"):
        await trainer.update(rollouts(), Named(name=name))
    assert (await trainer.weights()) == (await policy().weights())


async def test_numpys_own_dtypes_are_taken() -> None:
    trainer, wide = policy(), policy()
    batch = rollouts()
    advantages = np.asarray(batch.row("advantages"), np.float64)
    assert await wide.update(batch.assign(advantages=advantages), ClippedLoss()) == await trainer.update(
        batch, ClippedLoss()
    )


async def test_a_column_of_other_rows_than_the_tokens_is_refused() -> None:
    batch = rollouts()
    short = Ragged(np.zeros(len(batch), np.float32), np.arange(len(batch) + 1))
    with pytest.raises(DataError, match=r"row 0 has \d+ tokens and 1 in `advantages`"):
        await policy().update(batch.assign(advantages=short), ClippedLoss())


async def test_a_critics_loss_is_refused() -> None:
    with pytest.raises(DataError, match="ValueLoss is a loss of `values`"):
        await policy().update(rollouts(), ValueLoss())


async def test_a_cancelled_update_ends_between_micro_batches_and_changes_nothing() -> None:
    trainer, fresh = policy(micro_batch_tokens=40), policy(micro_batch_tokens=40)
    cancelled, next_ = (asyncio.create_task(trainer.update(rollouts(), ClippedLoss())) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await next_ == await fresh.update(rollouts(), ClippedLoss())
    assert await trainer.weights() == await fresh.weights()


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ([[1, 1, 1], [0]], "row 0 is True at the first token"),
        ([[0, 0, 0], [0]], "nothing to learn: `loss_mask` is False for all 4 tokens of 2 rows"),
    ],
)
async def test_masks_that_cannot_be_learned(mask: list[list[int]], text: str) -> None:
    tokens = Ragged.of([[2, 3, 4], [5]], np.int32)
    with pytest.raises(DataError, match=text):
        await policy().update(Batch.of(tokens=tokens, loss_mask=Ragged.of(mask, np.bool_)), CrossEntropy())
