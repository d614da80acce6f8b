"""Why a run does not learn: warning signs in its numbers, each with evidence and advice.

A sign must not appear in healthy runs: a number that is low because the task is solved is not a sign.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl.observe.run_files import Line, Record
from meshrl.observe.run_statistics import Curve, curve_of, finite, steps_without

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


class _Numbers:
    """The numbers in which signs are sought."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.reward = self.step("reward")
        curves = ((name, curve_of(record.evaluations, name)) for name in ("eval/greedy", "eval/reward"))
        self.held_out = next(((name, curve) for name, curve in curves if curve is not None), None)
        """Name and curve of the measure on held-out prompts. None without one."""
        result = _held_out_result(record.summary, self.reward)
        if result is None and self.held_out and self.held_out[0] != "eval/reward":
            result = self.held_out[1].last
        if result is None and self.reward is not None and self.reward.scale <= 1:
            result = self.reward.last
        self.is_solved = result is not None and result >= _SOLVED
        """True if the result is almost the best possible. False if that is unknown, as for rewards outside 0 to 1."""
        # What is known about a task that does not count as solved:
        self.unsolved = "the task is not solved"
        if result is None and self.reward is not None:
            self.unsolved = "rewards outside 0 to 1 do not tell whether the task is solved"

    def step(self, name: str) -> Curve | None:
        return curve_of(self.record.metrics, name)


def diagnose(record: Record) -> Sequence[Finding]:
    """Find warning signs in a run, the most serious first, as `_SIGNS` lists them. Empty before `STEPS` steps."""
    if len(record.metrics) < STEPS:
        return ()
    run = _Numbers(record)
    signs = ((name, check(run), advice) for name, check, advice in _SIGNS)
    return tuple(Finding(name, evidence, advice) for name, evidence, advice in signs if evidence)


def _held_out_result(summary: Line, reward: Curve | None) -> float | None:
    """The summary's result on held-out prompts after the last step, if its maximum is known."""
    if (exact := finite(summary.get("exact_match_after"))) is not None:
        return exact
    return finite(summary.get("reward_after")) if reward is not None and reward.scale <= 1 else None


def _no_number(run: _Numbers) -> str:
    for name in ("loss", "grad_norm", "reward"):
        if without := steps_without(run.record.metrics, name):
            return f"`{name}` is not a finite number in {len(without)} steps, first in step {without[0]}"
    return ""


def _reward_errors(run: _Numbers) -> str:
    errors, rows = run.step("reward_errors"), run.step("rows")
    if errors is None or rows is None:
        return ""
    share = errors.values.sum() / max(1.0, rows.values.sum()) - _unknown(run)
    return f"{share:.0%} of the rows could not be judged and count as rewards of 0" if share > 0.05 else ""


def _unknown_rewards(run: _Numbers) -> str:
    share = _unknown(run)
    return f"the reward of {share:.0%} of the rows is unknown, so nothing is learned from them" if share > 0.05 else ""


def _unknown(run: _Numbers) -> float:
    """Return the share of all rows whose reward is unknown. A step may have few rows or many."""
    shares, rows = run.step("unknown_rewards"), run.step("rows")
    if shares is None or rows is None or not rows.values.any():
        return 0.0
    return float((shares.values * np.interp(shares.steps, rows.steps, rows.values)).sum() / rows.values.sum())


def _collapse(run: _Numbers) -> str:
    if (reward := run.reward) is None:
        return ""
    smooth = reward.smooth()
    best = int(smooth.argmax())
    peak, gained = float(smooth[best]), float(smooth[best]) - reward.first
    if gained <= 0.1 * reward.scale or peak - reward.last <= max(0.5 * gained, reward.chance):
        return ""
    return f"`reward` rose from {reward.first:.3g} to {peak:.3g} at step {reward.steps[best]}, and is {reward.last:.3g}"


def _hacking(run: _Numbers) -> str:
    reward, held_out = run.reward, run.held_out
    if reward is None or held_out is None or len(held_out[1].values) < 4:
        return ""
    name, curve = held_out
    best = int(curve.values.argmax())
    peak, now, step = float(curve.values[best]), float(curve.values[-2:].mean()), int(curve.steps[best])
    prompts = curve_of(run.record.evaluations, "eval/prompts")
    chance = 2 * np.sqrt(0.5 / prompts.last) if prompts and name != "eval/reward" else 0.0
    rose = reward.last - reward.at(step)
    if best >= len(curve.values) - 2 or peak - now <= max(0.1 * curve.scale, chance) or rose <= 0.02 * reward.scale:
        return ""
    return (
        f"since step {step} `reward` has risen from {reward.at(step):.3g} to {reward.last:.3g}, and `{name}` on "
        f"held-out prompts has fallen from {peak:.3g} to {now:.3g}"
    )


def _entropy(run: _Numbers) -> str:
    entropy = run.step("entropy")
    if entropy is None or run.reward is None or run.is_solved or entropy.last >= 0.1 * entropy.first:
        return ""
    return f"`entropy` fell from {entropy.first:.3g} to {entropy.last:.3g} nats for a token, and {run.unsolved}"


def _no_signal(run: _Numbers) -> str:
    alike, reward = run.step("zero_std_groups"), run.reward
    if alike is None or run.is_solved or alike.last < 0.9:
        return ""
    mean = f" of {reward.last:.3g}" if reward else ""
    alike_groups = f"in {alike.last:.0%} of the groups all completions have the same reward, with a mean{mean}"
    return f"{alike_groups}, and {run.unsolved}"


def _clipped(run: _Numbers) -> str:
    clipped = run.step("clip_fraction")
    if clipped is None or clipped.last <= 0.3:
        return ""
    return f"`clip_fraction`: the loss clips {clipped.last:.0%} of the tokens (the median of the last steps)"


def _sampler_difference(run: _Numbers) -> str:
    apart = run.step("sampler_difference")
    if apart is None or apart.last <= 0.05:
        return ""
    return (
        f"`sampler_difference`: with the same weights, sampler and policy give the same tokens log-probs that are "
        f"{apart.last:.3g} nats apart"
    )


def _stale(run: _Numbers) -> str:
    size, staleness = run.step("effective_sample_size"), run.step("staleness")
    if size is None or size.last >= 0.5:
        return ""
    behind = f", and rows are {staleness.last:.2g} publications behind" if staleness else ""
    return f"`effective_sample_size`: after the correction the tokens count as {size.last:.0%} of their number{behind}"


def _length(run: _Numbers) -> str:
    length, cut, reward = (run.step(name) for name in ("completion_tokens", "truncated", "reward"))
    if length is None or run.is_solved:
        return ""
    growth = f"completions grew from {length.first:.3g} to {length.last:.3g} tokens"
    if cut is not None and cut.last >= 0.3 and cut.last - cut.first >= 0.2:
        return f"{growth}, and {cut.last:.0%} of them reach `sampling.max_tokens` ({cut.first:.0%} at the beginning)"
    if reward is not None and length.last >= 2 * length.first and reward.last <= reward.first + 0.02 * reward.scale:
        return f"{growth}, and `reward` did not rise with them ({reward.first:.3g} to {reward.last:.3g})"
    return ""


_SIGNS: Final[Sequence[tuple[str, Callable[[_Numbers], str], str]]] = (
    (
        "no number",
        _no_number,
        "lower `policy.optimizer.lr`, set `policy.optimizer.max_grad_norm`, and look for rewards that are not finite",
    ),
    ("reward errors", _reward_errors, 'read `reward_error` in samples.jsonl, and set `reward.errors = "mask"`'),
    ("unknown rewards", _unknown_rewards, "read `reward_error` in samples.jsonl, and fix what judges these rows"),
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
        _sampler_difference,
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
