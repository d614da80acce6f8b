"""How completions are sampled: the tables that a sampler receives."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from meshrl.config import Config

MOST_COMPLETIONS: Final = 65_536
"""Of one prompt in one call: all its rows are in memory at once."""


class Sampling(Config):
    """How completions are drawn."""

    beside: ClassVar[bool] = False
    """Whether the call is none of training's: of `BesideSampling`."""
    joins: ClassVar[bool] = False
    """Whether the call may decode with others of the same sampling as one: of `JoinedSampling`."""
    n: int = Field(default=1, gt=0, le=MOST_COMPLETIONS)
    """Completions a prompt."""
    max_tokens: int = Field(default=16, gt=0, le=2**24)
    """The most new tokens; a row's own `max_tokens` column goes before it."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the most probable tokens that have so much together. Log-probs stay those of the whole distribution."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Draw from so many of the most probable tokens; 0 keeps the whole vocabulary. Log-probs as with `top_p`."""
    ignore_eos: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion; the completion text is cut before them, the tokens are kept."""
    seed: int = 0


class GroupSampling(Sampling):
    """How the completions of an algorithm are drawn that compares those of one prompt: at least two."""

    n: int = Field(default=8, ge=2, le=MOST_COMPLETIONS)


class JoinedSampling(Sampling):
    """How rows are drawn of which few come at a time: a sampler may decode those of several calls as one."""

    joins: ClassVar[bool] = True


class PairSampling(Sampling):
    """How completions are drawn of which the best and the worst are compared: at least two for each prompt."""

    n: int = Field(default=2, ge=2, le=MOST_COMPLETIONS)
