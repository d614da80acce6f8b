"""The numbers of a run: what each means, its unit, and the side whose colour it has."""

from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, TypeAlias

Hue: TypeAlias = Literal["rollout", "training", "scoring", "sync", "plain"]
"""A side of the run, as colours of the page tell them; plain is a number of no side."""


class Quantity(NamedTuple):
    """What a number is."""

    unit: str = ""
    """Empty where it has none, or nobody knows."""
    hue: Hue = "plain"
    meaning: str = ""
    """A sentence or two, for the reference."""


FRONT: Final = (
    *("reward", "eval/reward", "eval/greedy", "completion_tokens", "reference_kl", "kl", "entropy"),
    *("loss", "clip_fraction", "staleness"),
)
"""The curves that stand in front, in this order: what tells of learning, then what tells of the updates."""

_NATS = "nats, mean over tokens"
_TOKENS = "mean over tokens"
_COMPLETIONS = "mean over completions"
_PAIRS = "mean over pairs"
_PROMPTS = "share of held-out prompts"
QUANTITIES: Final[dict[str, Quantity]] = {
    "step": Quantity("", "plain", "The step's number, from 0."),
    "step_s": Quantity("seconds", "plain", "How long the step took."),
    "seconds": Quantity("seconds", "plain", "Time since the run began."),
    "rows": Quantity("in a step", "plain", "Rows of the step's batch; without a batch, those of the update."),
    "tokens": Quantity("in a step", "plain", "Tokens of the step's batch, those of its prompts too."),
    "reward": Quantity(_COMPLETIONS, "scoring", "The reward of the step's completions."),
    "reward_sampled": Quantity(_COMPLETIONS, "scoring", "The reward of completions drawn of held-out prompts."),
    "reward/*": Quantity(_COMPLETIONS, "scoring", "One of several reward functions, by its name, before its weight."),
    "reward_errors": Quantity("completions", "scoring", "Completions whose reward function raised; their reward is 0."),
    "zero_std_groups": Quantity(
        "share of groups whose completions all have one reward",
        "scoring",
        "Groups that teach nothing: no completion is better than another. Harder or easier prompts lower it.",
    ),
    "kept": Quantity("share of completions", "scoring", "What expert iteration trains on: the best of each group."),
    "completion_tokens": Quantity("tokens, mean over completions", "rollout", "The length of a completion."),
    "truncated": Quantity("share of completions", "rollout", "Completions that reached the most tokens they may have."),
    "turns": Quantity("turns, mean over episodes", "rollout", "How often the model spoke in an episode."),
    "conversations": Quantity("conversations, mean over episodes", "rollout", "How many an agent held in an episode."),
    "tries": Quantity("mean over episodes", "rollout", "How often an episode was played, with `agent.retries`."),
    "staleness": Quantity(
        "versions behind, mean over rows",
        "sync",
        "How many versions the policy was ahead of the weights that drew a row. Above 0 with `ahead` alone.",
    ),
    "staleness_max": Quantity("versions behind", "sync", "The same for the oldest row: at most `ahead`."),
    "loss": Quantity("", "training", "The loss of the update, normalised over the global batch."),
    "lr": Quantity("", "training", "The learning rate of the update."),
    "grad_norm": Quantity("", "training", "The norm of the gradient, before it is clipped."),
    "entropy": Quantity(_NATS, "training", "How undecided the policy is at a token. Near 0 it explores no more."),
    "ratio": Quantity(_TOKENS, "training", "The policy's probability over the one that the loss is anchored to."),
    "kl": Quantity(_NATS, "training", "How far the policy is from the one that the loss is anchored to (k3 estimate)."),
    "clip_fraction": Quantity("share of tokens", "training", "Tokens whose ratio the loss clips."),
    "sampler_ratio": Quantity(
        _TOKENS, "training", "The trainer's probability over the sampler's. Far from 1, they compute differently."
    ),
    "sampler_kl": Quantity(_NATS, "training", "How far the trainer is from the sampler that drew the tokens (k3)."),
    "reference_kl": Quantity(_NATS, "training", "How far the policy is from the reference, as the loss penalises it."),
    "reference_k1": Quantity(
        "nats", "training", "How far the policy is from the reference (k1 estimate), where rewards are penalised by it."
    ),
    "teacher_kl": Quantity(_NATS, "training", "How far the policy is from its teacher, over the policy's own tokens."),
    "mismatched_kl": Quantity("nats", "training", "KTO's reference point: the KL as mismatched rows estimate it."),
    "correction": Quantity(_TOKENS, "training", "The weight of importance sampling, as it was applied."),
    "correction_squared": Quantity(_TOKENS, "training", "Its square, of which `effective_sample_size` is made."),
    "correction_clipped": Quantity("share of tokens", "training", "Tokens whose weight was cut, or masked."),
    "effective_sample_size": Quantity(
        "share of tokens", "training", "What part of its tokens the corrected batch is worth, from 0 to 1."
    ),
    "margin": Quantity(
        _PAIRS, "training", "How much better the preferred text does than the other, before the update."
    ),
    "accuracy": Quantity("share", "training", "How often the better text, or step, is told to be the better."),
    "chosen_log_ratio": Quantity("nats, mean over pairs", "training", "`log(pi / pi_ref)` of the preferred text."),
    "rejected_log_ratio": Quantity("nats, mean over pairs", "training", "`log(pi / pi_ref)` of the other text."),
    "chosen_score": Quantity(_PAIRS, "training", "The reward model's score of the preferred text."),
    "rejected_score": Quantity(_PAIRS, "training", "The reward model's score of the other text."),
    "right_score": Quantity("mean over steps", "training", "The reward model's score of right steps."),
    "wrong_score": Quantity("mean over steps", "training", "The reward model's score of wrong steps."),
    "solved": Quantity("share of texts", "training", "Texts of which the reward model judges every step rightly."),
    "drift": Quantity(
        _TOKENS, "training", "How far a token is from where it was when margins were computed: 0 but for rounding."
    ),
    "utility": Quantity(_TOKENS, "training", "KTO's value of a row, from 0 to 1."),
    "critic_explained_variance": Quantity(
        "", "training", "How much of the returns' variance the critic explains. 1 is all; 0 or less is nothing."
    ),
    "critic_value": Quantity(_TOKENS, "training", "What the critic expects."),
    "critic_value_error": Quantity(_TOKENS, "training", "The squared error of what it expects."),
    "critic_return": Quantity(_TOKENS, "training", "What it is trained towards."),
    "critic_return_squared": Quantity(_TOKENS, "training", "Its square, of which the explained variance is made."),
    "eval/greedy": Quantity(_PROMPTS, "scoring", "Prompts whose greedy completion is right."),
    "eval/pass@*": Quantity(_PROMPTS, "scoring", "Prompts of which one of so many sampled completions is right."),
    "eval/reward": Quantity(f"{_COMPLETIONS}, held out", "scoring", "The reward of sampled completions."),
    "eval/truncated": Quantity("share of completions", "rollout", "Those that reached the most tokens."),
    "eval/reward_errors": Quantity("completions", "scoring", "Those whose reward function raised."),
    "eval/prompts": Quantity("prompts", "plain", "How many were judged."),
    "eval/version_*": Quantity("version", "sync", "The oldest and the newest weights that drew a token of it."),
    "exact_match": Quantity(_PROMPTS, "scoring", "Prompts whose greedy completion is the answer, letter by letter."),
    "exact_match_sampled": Quantity("share of completions", "scoring", "Sampled completions that are the answer."),
    "sampler_difference": Quantity(
        "nats", "sync", "How far the sampler's log-probs are from its policy's, at most, after it took new weights."
    ),
    "sampler_pause_s": Quantity("seconds", "sync", "How long the sampler drew nothing while it took new weights."),
    "sampler replicas": Quantity("replicas", "rollout", "Replicas of the sampler that are there."),
    "groups *": Quantity("groups", "rollout", "Groups of completions that are ready to be trained on, or being drawn."),
    "*clip_fraction": Quantity("share of tokens", "training", "The same of another role, such as `critic_value_...`."),
    "*_rows": Quantity("in an update", "training", "Rows of a role's update."),
    "*_tokens": Quantity("in an update", "training", "Tokens of a role's update."),
    "*_kl": Quantity(_NATS, "training", "A distance between two models, by its name."),
    "*_loss": Quantity("", "training", "The loss of a role's update."),
    "*_lr": Quantity("", "training", "A role's learning rate."),
    "*_grad_norm": Quantity("", "training", "A role's gradient norm."),
    "critic_*": Quantity("", "training", "What the critic's update tells."),
    "*_s": Quantity("seconds", "plain", "A time, by its name."),
}
"""By name, in which `*` stands for any text; the first that fits is meant."""


def quantity(name: str) -> Quantity:
    """What a metric, a gauge or a number of the summary is, by its name."""
    return next((known for pattern, known in QUANTITIES.items() if fnmatchcase(name, pattern)), Quantity())
