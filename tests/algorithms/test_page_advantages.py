"""What a page gives to `policy.update`, row by row against the paper in float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

import meshrl as rl
from meshrl.data import Source
from meshrl.testing import FakePolicy, FakeReference, FakeReward, FakeRun, FakeSampler
from tests.algorithms.pages import FAKES, numbers, play

Floats: TypeAlias = NDArray[np.float64]

KL = 0.3
MAX_TOKENS, OVERLONG = 8, 4


def logprobs(tokens: ArrayLike, of: str) -> NDArray[np.float32]:
    numbers = np.asarray(tokens, np.int64) * {"policy": 7, "reference": 5}[of]
    return ((numbers + np.arange(len(numbers))) % 11 / -10).astype(np.float32)


def reward(completion: str) -> float:
    return sum(map(ord, completion)) % 9 / 9


def column(batch: rl.Batch, of: str, source: Source) -> rl.Ragged:
    return rl.Ragged.of([logprobs(row, of) for row in batch.tokens], np.float32, source=source)


class Told(FakePolicy):
    scored = 0

    def __init__(self, skill: float) -> None:
        super().__init__(rl.PolicyConfig(model="none"), skill=skill)

    async def logprobs(self, batch: rl.Batch) -> rl.Batch:
        self.scored += 1
        return batch.assign(logprobs=column(batch, "policy", Source.trainer(self.version)))


class ToldReference(FakeReference):
    async def logprobs(self, batch: rl.Batch) -> rl.Batch:
        return batch.assign(reference_logprobs=column(batch, "reference", Source("reference")))


class Graded(FakeReward):
    unknown = -1

    async def score(self, batch: rl.Batch) -> rl.Batch:
        texts = [str(text) for text in batch.objects("completion")]
        errors = ["no verdict" if at % 4 == self.unknown else None for at in range(len(texts))]
        return rl.with_rewards(await batch.load(), [reward(text) for text in texts], errors)


@dataclass(frozen=True)
class Row:
    group: int
    prompt: str
    answer: str
    completion: str
    log_ratios: Floats
    advantages: Floats

    @property
    def reward(self) -> float:
        return reward(self.completion)


async def given_by(name: str, policy: Told, table: Mapping[str, object], unknown: int) -> list[rl.Batch]:
    given = [ToldReference(rl.ReferenceConfig(model="none"))] if "kl" in table else []
    graded = Graded(rl.RewardConfig())
    graded.unknown = unknown
    run = FakeRun(policy, FakeSampler(rl.SamplerConfig(model="none")), graded, *given)
    await play(name, run, {**FAKES, **table}, rl.Task(train=numbers(0, 12), held_out=numbers(0, 2)))
    return list(policy.updates)


def rows_of(updates: Sequence[rl.Batch]) -> list[Row]:
    rows = []
    for batch in updates:
        texts = zip(*(batch.objects(name) for name in ("prompt", "answer", "completion")), strict=True)
        given = batch["advantages"]
        for at, (tokens, named) in enumerate(zip(batch.tokens, texts, strict=True)):
            mask = np.asarray(batch.loss_mask[at], np.bool_)
            if not mask.any():  # its reward, or that of the greedy completion, is unknown
                assert not np.any(given[at] if isinstance(given, rl.Ragged) else batch.row("advantages")[at])
                continue
            whole = given[at] if isinstance(given, rl.Ragged) else np.where(mask, batch.row("advantages")[at], 0)
            advantages = np.asarray(whole, np.float64)
            assert not advantages[~mask].any()
            apart = logprobs(tokens, "policy").astype(float) - logprobs(tokens, "reference").astype(float)
            prompt, answer, completion = map(str, named)
            rows.append(Row(int(batch.groups[at]), prompt, answer, completion, apart[mask], advantages[mask]))
    return rows


def rest(values: Floats) -> Floats:
    return np.array([values[at:].sum() for at in range(len(values))])


def rloo(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`R_i - mean(R_j, j != i)`, `R = r - kl log(pi(y) / pi_ref(y))`: arXiv:2402.14740."""
    lowered = [row.reward - kl * row.log_ratios.sum() for row in rows]
    found: list[Floats] = []
    for at, row in enumerate(rows):
        others = [lowered[j] for j, other in enumerate(rows) if other.group == row.group and j != at]
        found.append(np.full(len(row.log_ratios), lowered[at] - float(np.mean(others or lowered[at]))))
    return found


def remax(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`R(y) - r(greedy)`, R as for RLOO: arXiv:2310.10505. The greedy completion is right from a skill of 1/2 on."""
    greedy = [reward(row.answer if skill >= 0.5 else row.prompt) for row in rows]
    lowered = [row.reward - kl * float(row.log_ratios.sum()) for row in rows]
    return spread(rows, [own - baseline for own, baseline in zip(lowered, greedy, strict=True)])


def whitened(values: Sequence[Floats]) -> list[Floats]:
    tokens = np.concatenate(values)
    return [(each - tokens.mean()) / tokens.std() for each in values]


def reinforce_pp(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """The reward less the KL from the token on, whitened: arXiv:2501.03262."""
    return whitened([row.reward - kl * rest(row.log_ratios) for row in rows])


def of_groups(rows: Sequence[Row], values: Sequence[float]) -> list[Floats]:
    pairs = list(zip(rows, values, strict=True))
    return [np.array([value for other, value in pairs if other.group == row.group]) for row in rows]


def spread(rows: Sequence[Row], values: Sequence[float]) -> list[Floats]:
    return [np.full(len(row.log_ratios), value) for row, value in zip(rows, values, strict=True)]


def grpo(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`(r_i - mean(r)) / std(r)` of the group, the sample's deviation, 1e-6 added to it: arXiv:2402.03300."""
    rewards = [row.reward for row in rows]
    return spread(rows, scaled(rewards, of_groups(rows, rewards)))


def scaled(rewards: Sequence[float], groups: Sequence[Floats]) -> list[float]:
    deviations = [float(of.std(ddof=1)) if len(of) > 1 else 1.0 for of in groups]
    return [(own - float(of.mean())) / (by + 1e-6) for own, of, by in zip(rewards, groups, deviations, strict=True)]


def dapo(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """As GRPO, but long completions lose `(L_max - L_cache - |y|) / L_cache`: arXiv:2503.14476, equation 13."""
    lost = [min(max((MAX_TOKENS - OVERLONG - len(row.log_ratios)) / OVERLONG, -1), 0) for row in rows]
    assert len(set(lost)) > 1
    rewards = [row.reward + penalty for row, penalty in zip(rows, lost, strict=True)]
    return spread(rows, scaled(rewards, of_groups(rows, rewards)))


def dr_grpo(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`r_i - mean(r)` of the group: arXiv:2503.20783."""
    groups = of_groups(rows, [row.reward for row in rows])
    return spread(rows, [row.reward - float(of.mean()) for row, of in zip(rows, groups, strict=True)])


def reinforce_pp_baseline(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """The reward less its group's mean, whitened: arXiv:2501.03262, with baseline."""
    return whitened(dr_grpo(rows, kl, skill))


def opo(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`r_i - sum_j l_j r_j / sum_j l_j` over the group, l the learned tokens: arXiv:2505.23585."""
    rewards = of_groups(rows, [row.reward for row in rows])
    lengths = of_groups(rows, [float(len(row.log_ratios)) for row in rows])
    baselines = [float(length @ of / length.sum()) for length, of in zip(lengths, rewards, strict=True)]
    return spread(rows, [row.reward - baseline for row, baseline in zip(rows, baselines, strict=True)])


def gpg(rows: Sequence[Row], kl: float, skill: float) -> list[Floats]:
    """`B / (B - M) (r_i - mean(r))`, M of B rows being of groups of equal rewards: arXiv:2504.02546."""
    equal = sum(len(set(of.tolist())) == 1 for of in of_groups(rows, [row.reward for row in rows]))
    assert 0 < equal < len(rows)
    return [len(rows) / (len(rows) - equal) * own for own in dr_grpo(rows, kl, skill)]


Paper: TypeAlias = Callable[[Sequence[Row], float, float], list[Floats]]
OWN: Sequence[Paper] = (rloo, remax, reinforce_pp, reinforce_pp_baseline, grpo, dr_grpo, dapo, opo, gpg)
PAPERS: Mapping[str, Paper] = {paper.__name__: paper for paper in OWN} | dict.fromkeys(("gspo", "cispo"), grpo)


@pytest.mark.parametrize("unknown", [-1, 1])
@pytest.mark.parametrize("name", PAPERS)
async def test_a_pages_advantages_are_the_papers(name: str, unknown: int) -> None:
    table: dict[str, Any] = {"steps": 1, "prompts": 6, "sampling": {"n": 4, "max_tokens": MAX_TOKENS}}
    if name == "dapo":
        table["overlong_buffer"] = OVERLONG
    for kl in (0.0, KL) if name in ("rloo", "remax", "reinforce_pp") else (0.0,):
        for skill in (0.4, 0.6):
            # Of one epoch, in as many parts as the page ships with.
            policy = Told(skill)
            rows = rows_of(await given_by(name, policy, {**table, "kl": kl} if kl else table, unknown))
            assert policy.scored == (kl > 0 or name == "reinforce_pp"), "without a KL the others ask for no log-probs"
            assert (len(rows) < 24) == (unknown >= 0)
            assert len({row.reward for row in rows}) > 4
            expected = PAPERS[name](rows, kl, skill)
            for row, own in zip(rows, expected, strict=True):
                np.testing.assert_allclose(row.advantages, own, rtol=1e-5, atol=1e-6, err_msg=f"{kl=}, {skill=}")
