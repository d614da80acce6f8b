"""Log-probs of the whole distribution from vLLM, which tells those of what `top_k` and `top_p` have left of it."""

from typing import Any

from torch import Tensor


def tell_whole(sampler: Any) -> None:
    """Let the sampler of one of vLLM's workers tell log-probs at the temperature, before `top_k` and `top_p`.

    It has to be in the mode "processed_logprobs". What it draws stays the same. vLLM has two: one of its first model
    runner, and one of its second. AttributeError where it is neither.
    """
    if hasattr(sampler, "topk_topp_sampler"):
        _first(sampler.topk_topp_sampler)
    else:
        _second(sampler)


def _first(restricting: Any) -> None:
    """Its part that restricts and draws gives tokens and log-probs."""
    forward = restricting.forward

    def told(logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor | None]:
        restricts = k is not None or p is not None
        whole = logits.log_softmax(-1) if restricts else None  # before `forward`, which may write into the logits
        drawn, left = forward(logits, generators, k, p)
        return drawn, whole if restricts else left

    restricting.forward = told


def _second(sampler: Any) -> None:
    """Its part that restricts and draws gives tokens and logits, of which log-probs are made later."""
    draw = sampler._sample_random  # noqa: SLF001 -- vLLM has no other place between the temperature and the rest

    def told(
        logits: Tensor, rows: object, rows_np: object, places: object, k: Tensor | None, p: Tensor | None, fused: bool
    ) -> tuple[Tensor, Tensor]:
        restricts = k is not None or p is not None
        whole = logits.clone() if restricts else logits
        drawn, left = draw(logits, rows, rows_np, places, k, p, fused)
        return drawn, whole if restricts else left

    sampler._sample_random = told  # noqa: SLF001 -- as above
