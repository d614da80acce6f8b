"""Why a run does not learn: warning signs in its numbers, each with evidence and advice.

A sign must not appear in healthy runs: a number that is low because the task is solved is not a sign.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl.observe.curves import Curve, Curves, finite
from meshrl.observe.reading import Line, Record

STEPS: Final = 30
"""Steps that a run needs before it is diagnosed."""
_SOLVED: Final = 0.9
"""Share of the best result. Above it, low entropy, groups without signal and full length are normal."""


@dataclass(frozen=True)
class Finding:
    """A warning sign of a run."""

    name: str
    evidence: str
    """The numbers and their steps."""
    advice: str
    """What to try first."""

    @property
    def page(self) -> str:
        """The page of the documentation that explains the sign."""
        return f"docs/diagnose.md#{self.name.replace(' ', '-')}"


@dataclass(frozen=True)
class Story:
    """The data in which signs are sought."""

    steps: Curves
    evaluations: Curves
    after: float | None
    """Final share of solved held-out prompts, or their reward between 0 and 1. None if not measured."""

    def held_out(self) -> tuple[str, Curve] | None:
        """Name and curve of the measure on held-out prompts. None without one."""
        curves = ((name, self.evaluations.get(name)) for name in ("eval/greedy", "eval/reward"))
        return next(((name, curve) for name, curve in curves if curve is not None), None)

    def is_solved(self) -> bool:
        """True if the result is almost the best possible. Unknown for rewards outside 0 to 1."""
        held_out, reward = self.held_out(), self.steps.get("reward")
        if self.after is not None:
            return self.after >= _SOLVED
        if held_out and held_out[0] != "eval/reward":
            return held_out[1].last >= _SOLVED
        return reward is not None and reward.scale <= 1 and reward.last >= _SOLVED

    def unsolved(self) -> str:
        """What is known about a task that does not count as solved."""
        held_out, reward = self.held_out(), self.steps.get("reward")
        exact = self.after is not None or (held_out and held_out[0] != "eval/reward")
        if exact or reward is None or reward.scale <= 1:
            return "the task is not solved"
        return "rewards outside 0 to 1 do not tell whether the task is solved"


def diagnose(record: Record) -> Sequence[Finding]:
    """Find warning signs in a run, the most serious first. Empty if the run has fewer than `STEPS` steps."""
    steps = Curves(record.metrics)
    story = Story(steps, Curves(record.evaluations), _after(record.summary, steps.get("reward")))
    if len(story.steps) < STEPS:
        return ()
    found = ((name, check(story), advice) for name, check, advice in _SIGNS)
    return tuple(Finding(name, evidence, advice) for name, evidence, advice in found if evidence)


def _after(summary: Line, reward: Curve | None) -> float | None:
    """The summary's result on held-out prompts after the last step, if its maximum is known."""
    if (exact := finite(summary.get("exact_match_after"))) is not None:
        return exact
    return finite(summary.get("reward_after")) if reward is not None and reward.scale <= 1 else None


def _no_number(story: Story) -> str:
    for name in ("loss", "grad_norm", "reward"):
        if without := story.steps.without_number(name):
            return f"`{name}` is not a finite number in {len(without)} steps, first in step {without[0]}"
    return ""


def _reward_errors(story: Story) -> str:
    errors, rows = story.steps.get("reward_errors"), story.steps.get("rows")
    if errors is None or rows is None or (share := errors.values.sum() / max(1.0, rows.values.sum())) <= 0.05:
        return ""
    return f"the reward function raised an error on {share:.0%} of the rows, which count as rewards of 0"


def _collapse(story: Story) -> str:
    reward = story.steps.get("reward")
    if reward is None:
        return ""
    smooth = reward.smooth()
    best = int(smooth.argmax())
    peak, gained = float(smooth[best]), float(smooth[best]) - reward.first
    if gained <= 0.1 * reward.scale or peak - reward.last <= max(0.5 * gained, reward.chance):
        return ""
    return f"`reward` rose from {reward.first:.3g} to {peak:.3g} at step {reward.steps[best]}, and is {reward.last:.3g}"


def _hacking(story: Story) -> str:
    reward, held_out = story.steps.get("reward"), story.held_out()
    if reward is None or held_out is None or len(held_out[1].values) < 4:
        return ""
    name, curve = held_out
    best = int(curve.values.argmax())
    peak, now, step = float(curve.values[best]), float(curve.values[-2:].mean()), int(curve.steps[best])
    prompts = story.evaluations.get("eval/prompts")
    chance = 2 * np.sqrt(0.5 / prompts.last) if prompts and name != "eval/reward" else 0.0
    rose = reward.last - reward.at(step)
    if best >= len(curve.values) - 2 or peak - now <= max(0.1 * curve.scale, chance) or rose <= 0.02 * reward.scale:
        return ""
    return (
        f"since step {step} `reward` has risen from {reward.at(step):.3g} to {reward.last:.3g}, and `{name}` on "
        f"held-out prompts has fallen from {peak:.3g} to {now:.3g}"
    )


def _entropy(story: Story) -> str:
    entropy = story.steps.get("entropy")
    if entropy is None or story.steps.get("reward") is None or story.is_solved() or entropy.last >= 0.1 * entropy.first:
        return ""
    return f"`entropy` fell from {entropy.first:.3g} to {entropy.last:.3g} nats for a token, and {story.unsolved()}"


def _no_signal(story: Story) -> str:
    alike, reward = story.steps.get("zero_std_groups"), story.steps.get("reward")
    if alike is None or story.is_solved() or alike.last < 0.9:
        return ""
    mean = f" of {reward.last:.3g}" if reward else ""
    told = f"in {alike.last:.0%} of the groups all completions have the same reward, with a mean{mean}"
    return f"{told}, and {story.unsolved()}"


def _clipped(story: Story) -> str:
    clipped = story.steps.get("clip_fraction")
    if clipped is None or clipped.last <= 0.3:
        return ""
    return f"`clip_fraction`: the loss clips {clipped.last:.0%} of the tokens (the median of the last steps)"


def _apart(story: Story) -> str:
    apart = story.steps.get("sampler_difference")
    if apart is None or apart.last <= 0.05:
        return ""
    return (
        f"`sampler_difference`: with the same weights, sampler and policy give the same tokens log-probs that are "
        f"{apart.last:.3g} nats apart"
    )


def _stale(story: Story) -> str:
    size, staleness = story.steps.get("effective_sample_size"), story.steps.get("staleness")
    if size is None or size.last >= 0.5:
        return ""
    behind = f", and rows are {staleness.last:.2g} publications behind" if staleness else ""
    return f"`effective_sample_size`: after the correction the tokens count as {size.last:.0%} of their number{behind}"


def _length(story: Story) -> str:
    length, cut, reward = (story.steps.get(name) for name in ("completion_tokens", "truncated", "reward"))
    if length is None or story.is_solved():
        return ""
    told = f"completions grew from {length.first:.3g} to {length.last:.3g} tokens"
    if cut is not None and cut.last >= 0.3 and cut.last - cut.first >= 0.2:
        return f"{told}, and {cut.last:.0%} of them reach `sampling.max_tokens` ({cut.first:.0%} at the beginning)"
    if reward is not None and length.last >= 2 * length.first and reward.last <= reward.first + 0.02 * reward.scale:
        return f"{told}, and `reward` did not rise with them ({reward.first:.3g} to {reward.last:.3g})"
    return ""


_SIGNS: Final[Sequence[tuple[str, Callable[[Story], str], str]]] = (
    (
        "no number",
        _no_number,
        "lower `policy.optimizer.lr`, set `policy.optimizer.max_grad_norm`, and look for rewards that are not finite",
    ),
    ("reward errors", _reward_errors, "read `reward_error` in samples.jsonl, and fix the reward function"),
    ("collapse", _collapse, "lower `policy.optimizer.lr`, add `loss.kl`, or go back to the checkpoint before the fall"),
    (
        "reward hacking",
        _hacking,
        "read the samples with the highest rewards, fix what they exploit, and stop at the best held-out step",
    ),
    (
        "entropy collapse",
        _entropy,
        "raise `loss.clip_high` (dapo), add `loss.kl`, lower `policy.optimizer.lr`, or sample at a higher temperature",
    ),
    (
        "groups without signal",
        _no_signal,
        "choose prompts that are solved now and then, sample more completions of each, or filter groups (dapo)",
    ),
    ("clipped tokens", _clipped, "lower `policy.optimizer.lr`, `epochs` or `minibatches`"),
    (
        "sampler apart",
        _apart,
        "give both sides the same dtype and attention, and for a mixture of experts set `sampler.record_experts`",
    ),
    ("stale rows", _stale, "lower `ahead`, make fewer updates for each batch, or lower `policy.optimizer.lr`"),
    (
        "length growth",
        _length,
        "penalise completions that are cut (dapo's overlong reward), or raise `sampling.max_tokens`",
    ),
)
"""Name, check (returns evidence, or nothing without the sign), and advice."""
