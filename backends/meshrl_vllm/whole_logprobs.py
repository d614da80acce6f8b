"""Log-probs of the whole distribution from vLLM, which returns those left by `top_k` and `top_p`."""

from typing import Any

from torch import Tensor


def return_whole_logprobs(sampler: Any) -> None:
    """Make the sampler of a vLLM worker return log-probs at the temperature, before `top_k` and `top_p`.

    It must use the mode "processed_logprobs". Samples stay the same. vLLM has two samplers, for its first and its
    second model runner. AttributeError if it is neither.
    """
    if hasattr(sampler, "topk_topp_sampler"):
        _first(sampler.topk_topp_sampler)
    else:
        _second(sampler)


def _first(restricting: Any) -> None:
    """Patch the part that restricts and samples, and returns tokens and log-probs."""
    forward = restricting.forward

    def sample(logits: Tensor, generators: object, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor | None]:
        restricts = k is not None or p is not None
        whole = logits.log_softmax(-1) if restricts else None  # before `forward`, which may write to the logits
        drawn, left = forward(logits, generators, k, p)
        return drawn, whole if restricts else left

    restricting.forward = sample


def _second(sampler: Any) -> None:
    """Patch the part that restricts and samples, and returns tokens and logits for later log-probs."""
    draw = sampler._sample_random  # noqa: SLF001 -- vLLM has no other place between temperature and restrictions

    def sample(
        logits: Tensor, rows: object, rows_np: object, places: object, k: Tensor | None, p: Tensor | None, fused: bool
    ) -> tuple[Tensor, Tensor]:
        restricts = k is not None or p is not None
        whole = logits.clone() if restricts else logits
        drawn, left = draw(logits, rows, rows_np, places, k, p, fused)
        return drawn, whole if restricts else left

    sampler._sample_random = sample  # noqa: SLF001 -- as above
