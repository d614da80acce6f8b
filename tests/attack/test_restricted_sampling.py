"""`top_p` and `top_k` restrict what is drawn; the log-probs of rows are of the whole distribution, as a trainer's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig, SamplerConfig, Sampling, SequenceLoss, rollout
from meshrl.run import RunConfig, find_doubts, load_job, shipped_configs
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.whole import tell_whole

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=1, heads=2, max_tokens=32)


async def test_the_ratio_of_a_first_update_is_1_and_nothing_is_clipped() -> None:
    clip, sequence = ClippedLoss(), SequenceLoss(clip=3e-4, clip_high=4e-4)
    prompts = Batch.of(prompt=["abc>", "h>"])
    for loss, keys in (clip, {"top_p": 0.9}), (clip, {"top_k": 3}), (sequence, {"top_p": 0.9, "temperature": 0.7}):
        sampling = Sampling.model_validate({"n": 8, "max_tokens": 8, **keys})
        rows = await rollout(TorchSampler(SamplerConfig(model=MODEL)), prompts, sampling)
        batch = rows.assign(advantages=np.where(np.arange(len(rows)) % 2, 1, -1).astype(np.float32))
        told = await TorchPolicy(PolicyConfig(model=MODEL)).update(batch, loss)
        assert told["ratio"] == pytest.approx(1, abs=1e-4), (loss, keys)
        assert told["clip_fraction"] == 0, (loss, keys)


def restricted(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Written into the logits, as vLLM may: the two most probable tokens are left."""
    if k is None and p is None:
        return logits
    return logits.masked_fill_(logits < logits.topk(2).values[:, 1:], -torch.inf)


class First:
    """As the sampler of vLLM's first model runner, and its `TopKTopPSampler`."""

    def __init__(self) -> None:
        self.topk_topp_sampler = self

    def forward(
        self, logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        left = restricted(logits, k, p)
        return left.argmax(-1), left.log_softmax(-1)


class Second:
    """As the sampler of vLLM's second model runner, whose log-probs are made of the logits that it gives."""

    def _sample_random(
        self, logits: Tensor, rows: object, rows_np: object, places: object, k: None, p: Tensor | None, fused: bool
    ) -> tuple[Tensor, Tensor]:
        left = restricted(logits, k, p)
        return left.argmax(-1), left

    def draw(self, logits: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, left = self._sample_random(logits, 0, 0, 0, None, p, False)
        return tokens, left.log_softmax(-1)


def test_either_of_vllms_samplers_tells_the_whole_distribution() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    first, second = First(), Second()
    for sampler in (first, second):
        tell_whole(sampler)
    for p in (None, torch.full((3,), 0.9)):
        for tokens, logprobs in (
            first.topk_topp_sampler.forward(logits.clone(), {}, None, p),
            second.draw(logits.clone(), p),
        ):
            assert torch.equal(tokens, logits.argmax(-1))
            assert logprobs is not None
            assert torch.equal(logprobs, logits.log_softmax(-1)), p


def doubts(config: str, *overrides: str) -> list[str]:
    return find_doubts(load_job(shipped_configs()[config], list(overrides), RunConfig).config)


def test_a_restricted_draw_under_a_loss_with_ratios_is_warned_of_by_name() -> None:
    (doubt,) = doubts("gspo/quickstart", "sampling.top_p=0.9")
    assert doubt.startswith("sampling.top_p = 0.9 with SequenceLoss: rows are sampled from a part of the distribution")
    assert len(doubts("grpo/quickstart", "sampling.top_p=0.9", "sampling.top_k=20")) == 2
    assert doubts("gspo/quickstart") == []
    assert doubts("expert_iteration/quickstart", "sampling.top_k=20") == []
