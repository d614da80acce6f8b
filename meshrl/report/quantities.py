"""What the numbers of a run are: the unit of each, and the side whose colour it has."""

import re
from typing import Literal, NamedTuple, TypeAlias

Hue: TypeAlias = Literal["rollout", "training", "scoring", "sync", "plain"]
"""A side of the run, as colours of the page tell them; plain is a number of no side."""


class Quantity(NamedTuple):
    """What a number is."""

    unit: str = ""
    """Empty where it has none, or nobody knows."""
    hue: Hue = "plain"


_NATS = "nats, mean over tokens"
_KNOWN = (
    (r"eval/(greedy|pass@\d+)|exact_match", Quantity("share of held-out prompts", "scoring")),
    (r"exact_match_sampled", Quantity("share of completions", "scoring")),
    (r"eval/reward", Quantity("mean over completions, held out", "scoring")),
    (r"reward(_sampled|/.+)?", Quantity("mean over completions", "scoring")),
    (r"(eval/)?reward_errors", Quantity("completions", "scoring")),
    (r"eval/prompts", Quantity("prompts")),
    (r"eval/version_\w+", Quantity("version", "sync")),
    (r"zero_std_groups", Quantity("share of groups whose completions all have one reward", "scoring")),
    (r"completion_tokens", Quantity("tokens, mean over completions", "rollout")),
    (r"turns", Quantity("turns, mean over episodes", "rollout")),
    (r"conversations", Quantity("conversations, mean over episodes", "rollout")),
    (r"tries", Quantity("times that an episode was played, mean", "rollout")),
    (r"(eval/)?truncated", Quantity("share of completions", "rollout")),
    (r"staleness", Quantity("versions behind, mean over rows", "sync")),
    (r"staleness_max", Quantity("versions behind", "sync")),
    (r"rows|tokens", Quantity("in a step")),
    (r"\w+_(rows|tokens)", Quantity("in an update", "training")),
    (r"sampler_difference", Quantity("nats", "sync")),
    (r"sampler_pause_s", Quantity("seconds", "sync")),
    (r"\w+_s|seconds", Quantity("seconds")),
    (r"groups \w+", Quantity("groups", "rollout")),
    (r"entropy|kl|\w+_kl", Quantity(_NATS, "training")),
    (r"\w*clip_fraction|correction_clipped|effective_sample_size", Quantity("share of tokens", "training")),
    (r"(sampler_)?ratio|correction\w*", Quantity("mean over tokens", "training")),
    (r"(\w+_)?(loss|grad_norm|lr)|critic_\w+", Quantity("", "training")),
)


def quantity(name: str) -> Quantity:
    """What a metric, a gauge or a number of the summary is, by its name."""
    return next((known for pattern, known in _KNOWN if re.fullmatch(pattern, name)), Quantity())
