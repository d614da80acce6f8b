"""The meaning, unit and colour of each number of a run."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, TypeAlias

Hue: TypeAlias = Literal["rollout", "training", "scoring", "sync", "plain"]
"""A part of the run, each with its own colour in the report. `plain` is for all other numbers."""


class MetricInfo(NamedTuple):
    """A number's unit, colour and meaning."""

    unit: str = ""
    """Empty if it has no unit or the unit is unknown."""
    hue: Hue = "plain"
    meaning: str = ""
    """A sentence or two, for the reference."""


FRONT: Final = (
    *("reward", "eval/reward", "eval/greedy", "completion_tokens", "reference_kl", "kl", "entropy"),
    *("loss", "clip_fraction", "staleness"),
)
"""The curves at the top of the report, in this order: first those that show learning, then those of updates."""

_NATS = "nats, mean over tokens"
_TOKENS = "mean over tokens"
_COMPLETIONS = "mean over completions"
_PAIRS = "mean over pairs"
_PROMPTS = "share of held-out prompts"
_METRICS: Final[Mapping[Hue, Mapping[str, tuple[str, str]]]] = {
    "scoring": {
        "reward": (_COMPLETIONS, "Reward of the step's completions."),
        "reward_sampled": (_COMPLETIONS, "Reward of sampled completions of held-out prompts."),
        "reward/*": (_COMPLETIONS, "Reward of one of several reward functions, by its name, before weighting."),
        "reward_errors": ("completions", "Completions whose reward function raised an error. Their reward is 0."),
        "zero_std_groups": (
            "share of groups",
            "Groups of equal rewards, which teach nothing. Harder or easier prompts lower the share.",
        ),
        "kept": (
            "share of completions",
            "Completions that expert iteration trains on, those with a high enough reward.",
        ),
        "eval/greedy": (_PROMPTS, "Prompts whose greedy completion is right."),
        "eval/pass@*": (_PROMPTS, "Prompts with at least one right completion among k samples (`pass@k`)."),
        "eval/reward": (f"{_COMPLETIONS}, held out", "Reward of sampled completions."),
        "eval/reward_errors": ("completions", "Completions whose reward function raised an error."),
        "exact_match": (_PROMPTS, "Prompts whose greedy completion equals the answer, character by character."),
        "exact_match_sampled": ("share of completions", "Sampled completions that equal the answer."),
    },
    "rollout": {
        "completion_tokens": ("tokens, mean over completions", "Length of a completion."),
        "truncated": ("share of completions", "Completions that were cut at the token limit."),
        "turns": ("turns, mean over episodes", "Turns of the model in an episode."),
        "conversations": ("conversations, mean over episodes", "Conversations that an agent held in an episode."),
        "tries": ("mean over episodes", "Attempts at an episode, with `agent.retries`."),
        "eval/truncated": ("share of completions", "Completions that were cut at the token limit."),
        "sampler replicas": ("replicas", "Replicas of the sampler that are available."),
        "groups *": ("groups", "Groups of completions that are ready for training, or in progress."),
    },
    "sync": {
        "staleness": (
            "publications behind, mean over rows",
            "Publications by which the policy was ahead of the weights that sampled a row. Above 0 only with `ahead`.",
        ),
        "staleness_max": ("publications behind", "Staleness of the oldest row. At most `ahead`."),
        "eval/version_*": (
            "version",
            "Oldest and newest version of the weights that sampled a token of the evaluation.",
        ),
        "sampler_difference": (
            "nats",
            "Largest difference between log-probs of sampler and policy after a weight sync.",
        ),
        "sampler_pause_s": ("seconds", "Time for which the sampler paused to load new weights."),
    },
    "training": {
        "loss": ("", "Loss of the update, normalised over the global batch."),
        "lr": ("", "Learning rate of the update."),
        "grad_norm": ("", "Norm of the gradient before clipping."),
        "entropy": (_NATS, "Entropy of the policy at a token. Near 0 the policy no longer explores."),
        "ratio": (_TOKENS, "Probability ratio of the policy to the loss's anchor."),
        "kl": (_NATS, "KL between the anchor of the loss and the policy (k3 estimate)."),
        "clip_fraction": ("share of tokens", "Tokens whose ratio is clipped by the loss."),
        "sampler_ratio": (
            _TOKENS,
            "Probability ratio of the trainer to the sampler. Far from 1, their results differ.",
        ),
        "sampler_kl": (_NATS, "KL between sampler and trainer (k3 estimate)."),
        "reference_kl": (_NATS, "KL of the policy from the reference, as it is penalised in the loss."),
        "reference_k1": ("nats", "KL of the policy from the reference (k1 estimate), as it is penalised in rewards."),
        "teacher_kl": (_NATS, "KL of the policy from its teacher, over the policy's tokens."),
        "mismatched_kl": ("nats", "KTO's reference point: the KL, estimated from mismatched prompts and completions."),
        "correction": (_TOKENS, "Importance weight, as it was applied."),
        "correction_squared": (_TOKENS, "Its square, from which `effective_sample_size` is computed."),
        "correction_clipped": ("share of tokens", "Tokens whose importance weight was truncated or masked."),
        "effective_sample_size": ("share of tokens", "Effective sample size of the corrected batch, from 0 to 1."),
        "margin": (_PAIRS, "Lead of the preferred text over the other one, before the update."),
        "accuracy": ("share", "Pairs, or steps, that the model judges as labelled."),
        "chosen_log_ratio": ("nats, mean over pairs", "`log(pi / pi_ref)` of the preferred text."),
        "rejected_log_ratio": ("nats, mean over pairs", "`log(pi / pi_ref)` of the other text."),
        "chosen_score": (_PAIRS, "Reward model's score of the preferred text."),
        "rejected_score": (_PAIRS, "Reward model's score of the other text."),
        "right_score": ("mean over steps", "Reward model's score of right steps."),
        "wrong_score": ("mean over steps", "Reward model's score of wrong steps."),
        "solved": ("share of texts", "Texts in which the reward model judges every step correctly."),
        "drift": (_TOKENS, "Change of a token's value since margins were computed. 0 except for rounding."),
        "utility": (_TOKENS, "KTO's utility of a row, from 0 to 1."),
        "critic_explained_variance": (
            "",
            "Share of the returns' variance that the critic explains. 1 is all, and 0 or less is nothing.",
        ),
        "critic_value": (_TOKENS, "Return that the critic predicts."),
        "critic_value_error": (_TOKENS, "Squared error of the critic's prediction."),
        "critic_return": (_TOKENS, "Return that the critic is trained to predict."),
        "critic_return_squared": (_TOKENS, "Its square, from which the explained variance is computed."),
        "*clip_fraction": ("share of tokens", "Clipped tokens of another role, such as `critic_value_clip_fraction`."),
        "*_rows": ("in an update", "Rows in a role's update."),
        "*_tokens": ("in an update", "Tokens in a role's update."),
        "*_kl": (_NATS, "KL divergence of two models, as its name says."),
        "*_loss": ("", "Loss of a role's update."),
        "*_lr": ("", "Learning rate of a role."),
        "*_grad_norm": ("", "Gradient norm of a role."),
        "critic_*": ("", "A number of the critic's update."),
    },
    "plain": {
        "step": ("", "Number of the step, from 0."),
        "step_s": ("seconds", "Duration of the step."),
        "seconds": ("seconds", "Time since the start of the run."),
        "rows": ("in a step", "Rows of the step's batch, or of the update if the step has no batch."),
        "tokens": ("in a step", "Tokens of the step's batch, prompts included."),
        "eval/prompts": ("prompts", "Number of held-out prompts that were evaluated."),
        "*_s": ("seconds", "A duration, as its name says."),
    },
}
"""Unit and meaning by colour and name."""

METRICS: Final = {
    name: MetricInfo(unit, hue, meaning) for hue, own in _METRICS.items() for name, (unit, meaning) in own.items()
}
"""The numbers by name, in which `*` matches any text."""


def metric_info(name: str) -> MetricInfo:
    """Return the unit, colour and meaning of a metric, a gauge or a number of the summary.

    Without an entry of its name, the first pattern that matches counts.
    """
    if name in METRICS:
        return METRICS[name]
    return next((known for pattern, known in METRICS.items() if fnmatchcase(name, pattern)), MetricInfo())
