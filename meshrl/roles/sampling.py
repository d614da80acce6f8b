"""How completions are sampled: the tables that a sampler receives."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from meshrl.config import Config

MOST_COMPLETIONS: Final = 65_536
"""Most completions of a prompt in a call. All of them are in memory at once."""


class Sampling(Config):
    """How completions are sampled."""

    beside: ClassVar[bool] = False
    """True if the call is not part of training, as with `BesideSampling`."""
    joins: ClassVar[bool] = False
    """True if the call may be decoded together with others of the same sampling, as with `JoinedSampling`."""
    n: int = Field(default=1, gt=0, le=MOST_COMPLETIONS)
    """Completions for each prompt."""
    max_tokens: int = Field(default=16, gt=0, le=2**24)
    """New tokens of a completion at most. A row's `max_tokens` column overrides it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. 0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the most probable tokens, whose probabilities sum to this. Log-probs are those of the whole
    distribution."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample only from this number of the most probable tokens. 0: from all. Log-probs are those of the whole
    distribution."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, up to `max_tokens`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion. The completion's text is cut before them, but its tokens are kept."""
    seed: int = 0
    """Seed for sampling."""


class GroupSampling(Sampling):
    """How completions are sampled for algorithms that compare completions of a prompt: at least two each."""

    n: int = Field(default=8, ge=2, le=MOST_COMPLETIONS)
    """Completions for each prompt."""


class JoinedSampling(Sampling):
    """How rows are sampled that arrive a few at a time. A sampler may decode the rows of several calls together."""

    joins: ClassVar[bool] = True


class PairSampling(Sampling):
    """How completions are sampled for algorithms that compare the best with the worst: at least two for each prompt."""

    n: int = Field(default=2, ge=2, le=MOST_COMPLETIONS)
    """Completions for each prompt."""
