"""The meaning, unit and colour of each number of a run."""

from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, TypeAlias

Hue: TypeAlias = Literal["rollout", "training", "scoring", "sync", "plain"]
"""A part of the run, each with its own colour in the report. `plain` is for all other numbers."""


class Quantity(NamedTuple):
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
QUANTITIES: Final[dict[str, Quantity]] = {
    "step": Quantity("", "plain", "Number of the step, from 0."),
    "step_s": Quantity("seconds", "plain", "Duration of the step."),
    "seconds": Quantity("seconds", "plain", "Time since the start of the run."),
    "rows": Quantity("in a step", "plain", "Rows of the step's batch, or of the update if the step has no batch."),
    "tokens": Quantity("in a step", "plain", "Tokens of the step's batch, prompts included."),
    "reward": Quantity(_COMPLETIONS, "scoring", "Reward of the step's completions."),
    "reward_sampled": Quantity(_COMPLETIONS, "scoring", "Reward of sampled completions of held-out prompts."),
    "reward/*": Quantity(
        _COMPLETIONS, "scoring", "Reward of one of several reward functions, by its name, before weighting."
    ),
    "reward_errors": Quantity(
        "completions", "scoring", "Completions whose reward function raised an error. Their reward is 0."
    ),
    "zero_std_groups": Quantity(
        "share of groups",
        "scoring",
        "Groups of equal rewards, which teach nothing. Harder or easier prompts lower the share.",
    ),
    "kept": Quantity(
        "share of completions",
        "scoring",
        "Completions that expert iteration trains on, those with a high enough reward.",
    ),
    "completion_tokens": Quantity("tokens, mean over completions", "rollout", "Length of a completion."),
    "truncated": Quantity("share of completions", "rollout", "Completions that were cut at the token limit."),
    "turns": Quantity("turns, mean over episodes", "rollout", "Turns of the model in an episode."),
    "conversations": Quantity(
        "conversations, mean over episodes", "rollout", "Conversations that an agent held in an episode."
    ),
    "tries": Quantity("mean over episodes", "rollout", "Attempts at an episode, with `agent.retries`."),
    "staleness": Quantity(
        "publications behind, mean over rows",
        "sync",
        "Publications by which the policy was ahead of the weights that sampled a row. Above 0 only with `ahead`.",
    ),
    "staleness_max": Quantity("publications behind", "sync", "Staleness of the oldest row. At most `ahead`."),
    "loss": Quantity("", "training", "Loss of the update, normalised over the global batch."),
    "lr": Quantity("", "training", "Learning rate of the update."),
    "grad_norm": Quantity("", "training", "Norm of the gradient before clipping."),
    "entropy": Quantity(_NATS, "training", "Entropy of the policy at a token. Near 0 the policy no longer explores."),
    "ratio": Quantity(_TOKENS, "training", "Probability ratio of the policy to the loss's anchor."),
    "kl": Quantity(_NATS, "training", "KL between the anchor of the loss and the policy (k3 estimate)."),
    "clip_fraction": Quantity("share of tokens", "training", "Tokens whose ratio is clipped by the loss."),
    "sampler_ratio": Quantity(
        _TOKENS, "training", "Probability ratio of the trainer to the sampler. Far from 1, their results differ."
    ),
    "sampler_kl": Quantity(_NATS, "training", "KL between sampler and trainer (k3 estimate)."),
    "reference_kl": Quantity(_NATS, "training", "KL of the policy from the reference, as it is penalised in the loss."),
    "reference_k1": Quantity(
        "nats", "training", "KL of the policy from the reference (k1 estimate), as it is penalised in rewards."
    ),
    "teacher_kl": Quantity(_NATS, "training", "KL of the policy from its teacher, over the policy's tokens."),
    "mismatched_kl": Quantity(
        "nats", "training", "KTO's reference point: the KL, estimated from mismatched prompts and completions."
    ),
    "correction": Quantity(_TOKENS, "training", "Importance weight, as it was applied."),
    "correction_squared": Quantity(_TOKENS, "training", "Its square, from which `effective_sample_size` is computed."),
    "correction_clipped": Quantity(
        "share of tokens", "training", "Tokens whose importance weight was truncated or masked."
    ),
    "effective_sample_size": Quantity(
        "share of tokens", "training", "Effective sample size of the corrected batch, from 0 to 1."
    ),
    "margin": Quantity(_PAIRS, "training", "Lead of the preferred text over the other one, before the update."),
    "accuracy": Quantity("share", "training", "Pairs, or steps, that the model judges as labelled."),
    "chosen_log_ratio": Quantity("nats, mean over pairs", "training", "`log(pi / pi_ref)` of the preferred text."),
    "rejected_log_ratio": Quantity("nats, mean over pairs", "training", "`log(pi / pi_ref)` of the other text."),
    "chosen_score": Quantity(_PAIRS, "training", "Reward model's score of the preferred text."),
    "rejected_score": Quantity(_PAIRS, "training", "Reward model's score of the other text."),
    "right_score": Quantity("mean over steps", "training", "Reward model's score of right steps."),
    "wrong_score": Quantity("mean over steps", "training", "Reward model's score of wrong steps."),
    "solved": Quantity("share of texts", "training", "Texts in which the reward model judges every step correctly."),
    "drift": Quantity(
        _TOKENS, "training", "Change of a token's value since margins were computed. 0 except for rounding."
    ),
    "utility": Quantity(_TOKENS, "training", "KTO's utility of a row, from 0 to 1."),
    "critic_explained_variance": Quantity(
        "", "training", "Share of the returns' variance that the critic explains. 1 is all, and 0 or less is nothing."
    ),
    "critic_value": Quantity(_TOKENS, "training", "Return that the critic predicts."),
    "critic_value_error": Quantity(_TOKENS, "training", "Squared error of the critic's prediction."),
    "critic_return": Quantity(_TOKENS, "training", "Return that the critic is trained to predict."),
    "critic_return_squared": Quantity(
        _TOKENS, "training", "Its square, from which the explained variance is computed."
    ),
    "eval/greedy": Quantity(_PROMPTS, "scoring", "Prompts whose greedy completion is right."),
    "eval/pass@*": Quantity(
        _PROMPTS, "scoring", "Prompts with at least one right completion among k samples (`pass@k`)."
    ),
    "eval/reward": Quantity(f"{_COMPLETIONS}, held out", "scoring", "Reward of sampled completions."),
    "eval/truncated": Quantity("share of completions", "rollout", "Completions that were cut at the token limit."),
    "eval/reward_errors": Quantity("completions", "scoring", "Completions whose reward function raised an error."),
    "eval/prompts": Quantity("prompts", "plain", "Number of held-out prompts that were evaluated."),
    "eval/version_*": Quantity(
        "version", "sync", "Oldest and newest version of the weights that sampled a token of the evaluation."
    ),
    "exact_match": Quantity(
        _PROMPTS, "scoring", "Prompts whose greedy completion equals the answer, character by character."
    ),
    "exact_match_sampled": Quantity("share of completions", "scoring", "Sampled completions that equal the answer."),
    "sampler_difference": Quantity(
        "nats", "sync", "Largest difference between log-probs of sampler and policy after a weight sync."
    ),
    "sampler_pause_s": Quantity("seconds", "sync", "Time for which the sampler paused to load new weights."),
    "sampler replicas": Quantity("replicas", "rollout", "Replicas of the sampler that are available."),
    "groups *": Quantity("groups", "rollout", "Groups of completions that are ready for training, or in progress."),
    "*clip_fraction": Quantity(
        "share of tokens", "training", "Clipped tokens of another role, such as `critic_value_clip_fraction`."
    ),
    "*_rows": Quantity("in an update", "training", "Rows in a role's update."),
    "*_tokens": Quantity("in an update", "training", "Tokens in a role's update."),
    "*_kl": Quantity(_NATS, "training", "KL divergence of two models, as its name says."),
    "*_loss": Quantity("", "training", "Loss of a role's update."),
    "*_lr": Quantity("", "training", "Learning rate of a role."),
    "*_grad_norm": Quantity("", "training", "Gradient norm of a role."),
    "critic_*": Quantity("", "training", "A number of the critic's update."),
    "*_s": Quantity("seconds", "plain", "A duration, as its name says."),
}
"""The numbers by name. `*` matches any text, and the first matching pattern counts."""


def quantity(name: str) -> Quantity:
    """Return the unit, colour and meaning of a metric, a gauge or a number of the summary."""
    return next((known for pattern, known in QUANTITIES.items() if fnmatchcase(name, pattern)), Quantity())
