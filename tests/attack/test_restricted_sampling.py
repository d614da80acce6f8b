"""`top_p` and `top_k` restrict what is drawn; the log-probs of rows are of the whole distribution, as a trainer's."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshrl.run import find_doubts, load_job, shipped_configs
from meshrl_vllm.whole import tell_whole


def restricted(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """Written into the logits, as vLLM may: the two most probable tokens are left."""
    if k is None and p is None:
        return logits
    return logits.masked_fill_(logits < logits.topk(2).values[:, 1:], -torch.inf)


def first(logits: Tensor, _: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the `TopKTopPSampler` of vLLM's first model runner."""
    left = restricted(logits, k, p)
    return left.argmax(-1), left.log_softmax(-1)


def second(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """As the sampler of vLLM's second model runner, whose log-probs are made of the logits that it gives."""
    left = restricted(logits, *rest[3:5])
    return left.argmax(-1), left


def test_either_of_vllms_samplers_tells_the_whole_distribution() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    one, other = (
        SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=first)),
        SimpleNamespace(_sample_random=second),
    )
    for sampler in (one, other):
        tell_whole(sampler)
    for p in (None, torch.full((3,), 0.9)):
        tokens, logprobs = one.topk_topp_sampler.forward(logits.clone(), {}, None, p)
        others, left = other._sample_random(logits.clone(), 0, 0, 0, None, p, False)
        for drawn, told in ((tokens, logprobs), (others, left.log_softmax(-1))):
            assert torch.equal(drawn, logits.argmax(-1))
            assert torch.equal(told, logits.log_softmax(-1)), p


def doubts(config: str, *overrides: str) -> list[str]:
    return find_doubts(load_job(shipped_configs()[config], list(overrides)).config)


def test_a_restricted_draw_under_a_loss_with_ratios_is_warned_of_by_name() -> None:
    (doubt,) = doubts("gspo/quickstart", "sampling.top_p=0.9")
    assert doubt.startswith("sampling.top_p = 0.9 with SequenceLoss: rows are sampled from a part of the distribution")
    assert len(doubts("grpo/quickstart", "sampling.top_p=0.9", "sampling.top_k=20")) == 2
    assert doubts("gspo/quickstart") == []
    assert doubts("expert_iteration/quickstart", "sampling.top_k=20") == []
