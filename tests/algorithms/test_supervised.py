"""Expert iteration and distillation: on fakes, against the papers' formulas, and learning on the torch backend."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl import ConfigError, MeshConfig, PolicyConfig, Run, RunConfig, TeacherConfig, check_teacher
from meshrl.config import validate
from meshrl.losses import ReverseKl, reverse_kl
from meshrl.mesh import INLINE_BYTES
from meshrl.run.jobs import load_script
from meshrl_hf.text import character_tokenizer

FAKE = {"backend": "fake", "model": "none"}
MODEL = {"characters": "abcd>", "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
BOTH_WAYS = pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])


@dataclass(frozen=True)
class Page:
    """What a page of the family needs to be run."""

    name: str
    fake: dict[str, object] = field(default_factory=dict)
    small: dict[str, object] = field(default_factory=dict)
    """For a run on torch."""
    falls: str | None = None
    """A number that the run makes smaller."""


PAGES = (
    Page("expert_iteration", {"reward": {"backend": "fake"}}, {"min_reward": 0.5, "prompts": 8, "sampling": {"n": 8}}),
    Page("distill", {"teacher": {"backend": "fake", "model": "teacher"}}, {"prompts": 64}, falls="teacher_kl"),
)
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


async def run_page(name: str, folder: Path, run: RunConfig, table: dict[str, Any]) -> list[dict[str, float]]:
    """Run the script as it is shipped; the numbers of each step."""
    script = load_script(Path(__file__).parents[2] / "algorithms" / f"{name}.py")
    async with Run(run) as under_way:
        await script.function(under_way, validate(script.schema, table, "test"))
    assert json.loads((folder / run.name / "summary.json").read_bytes())["status"] == "finished"
    return [json.loads(line) for line in (folder / run.name / "metrics.jsonl").read_text().splitlines()]


def alone(folder: Path, name: str) -> RunConfig:
    """A run of one thread."""
    return RunConfig(folder=str(folder), name=name, meshes={"main": MeshConfig(cpus=1)})


def sums(folder: Path) -> dict[str, object]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(200)))
    return {"source": str(path), "held_out": 16, "held_out_fraction": 0.2}


@EACH_PAGE
@BOTH_WAYS
@pytest.mark.parametrize("ahead", [0, 2])
async def test_a_page_learns_on_fakes(tmp_path: Path, page: Page, inline_bytes: int, ahead: int) -> None:
    table = {"task": sums(tmp_path), "policy": FAKE, "sampler": FAKE, "prompts": 8, "steps": 12, "ahead": ahead}
    run = RunConfig(folder=str(tmp_path), name="run", inline_bytes=inline_bytes)
    await run_page(page.name, tmp_path, run, {**table, **page.fake})
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert (summary["exact_match_before"], summary["exact_match_after"]) == (0.0, 1.0)
    assert summary["steps"] == 12


def letters(folder: Path, characters: str = "acd") -> dict[str, object]:
    path = folder / "rows.jsonl"
    rows = [{"question": f"{one}{other}>", "answer": "bbbb"} for one in characters for other in characters]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"source": str(path), "held_out": 0}


def small(folder: Path, page: Page) -> dict[str, Any]:
    """A run on the torch backend that is to write b, which a reward counts."""
    (folder / "rewards.py").write_text(
        'def letter_b(prompt, completion, row):\n    return completion.count("b") / 4\n', "utf-8"
    )
    reward = {} if page.name == "distill" else {"reward": {"function": f"{folder / 'rewards.py'}:letter_b"}}
    sampling = {"max_tokens": 4, "ignore_eos": True, **page.small.get("sampling", {})}  # type: ignore[dict-item]
    policy = {"model": MODEL, "optimizer": {"lr": 0.02}}
    return {"task": letters(folder), "policy": policy, **reward, **page.small, "sampling": sampling}


async def test_expert_iteration_then_distill_learn_on_torch(tmp_path: Path) -> None:
    """A policy learns to write b, and is the teacher of another that has never seen a reward."""
    expert, distill = PAGES
    run = alone(tmp_path, "expert")
    steps = await run_page(expert.name, tmp_path, run, {**small(tmp_path, expert), "steps": 15})
    assert steps[0]["reward"] < 0.35
    assert steps[-1]["reward"] > 0.8
    assert steps[0]["kept"] < steps[-1]["kept"]

    run = alone(tmp_path, "student")
    table = small(tmp_path, distill)
    table["policy"]["model"] = {**MODEL, "hidden_size": 24, "ffn_size": 48}
    table["teacher"] = {"model": str(tmp_path / "expert" / "model")}
    steps = await run_page(distill.name, tmp_path, run, {**table, "steps": 25})
    assert steps[-1]["teacher_kl"] < steps[0]["teacher_kl"] / 4
    tokens = [json.loads(line) for line in (tmp_path / "student" / "samples.jsonl").read_text().splitlines()]
    written = {step: "".join(row["completion"] for row in tokens if row["step"] == step) for step in (0, 20)}
    assert written[0].count("b") < 0.6 * len(written[0])
    assert written[20].count("b") > 0.8 * len(written[20])


async def test_a_step_that_keeps_nothing_changes_nothing(tmp_path: Path) -> None:
    page = Page("expert_iteration", small={"min_reward": 2.0, "prompts": 4, "sampling": {"n": 2}})
    table = {**small(tmp_path, page), "steps": 3, "ahead": 1}
    steps = await run_page(page.name, tmp_path, alone(tmp_path, "run"), table)
    assert [step["kept"] for step in steps] == [0.0] * 3
    assert all("loss" not in step for step in steps)
    assert [step["staleness"] for step in steps] == [0.0] * 3


# --- the loss -------------------------------------------------------------------------------------


def drawn(seed: int, vocabulary: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student and log-probs of a teacher over a vocabulary."""
    random = np.random.default_rng(seed)
    logits = torch.tensor(random.normal(size=vocabulary), requires_grad=True)
    return logits, torch.tensor(random.normal(size=vocabulary)).log_softmax(0)


@pytest.mark.parametrize("seed", range(3))
def test_on_its_own_tokens_it_is_the_kl_with_the_gradient_of_the_kl(seed: int) -> None:
    """The expectation over the student's tokens, against KL(p || q) = sum p log(p / q) written out in float64."""
    logits, teacher = drawn(seed)
    student = logits.log_softmax(0)
    tokens = reverse_kl(student, student.detach(), teacher)
    expected = (student.exp().detach() * tokens).sum()
    p, q = np.exp(student.detach().numpy()), np.exp(teacher.numpy())
    kl = float(np.sum(p * np.log(p / q)))
    assert expected.item() == pytest.approx(kl, abs=1e-12)
    (found,) = torch.autograd.grad(expected, logits)
    by_hand = p * (np.log(p / q) - kl)  # d KL / d logits of a softmax
    np.testing.assert_allclose(found.numpy(), by_hand, atol=1e-12)


def test_on_others_tokens_the_weight_makes_it_unbiased_up_to_its_bound() -> None:
    logits, teacher = drawn(7)
    other, _ = drawn(8)
    student, sampler = logits.log_softmax(0), other.detach().log_softmax(0)
    p, s, q = (np.exp(each.detach().numpy()) for each in (student, sampler, teacher))
    for most in (1e9, 1.5):
        tokens = reverse_kl(student, sampler, teacher, most)
        np.testing.assert_allclose(
            tokens.detach().numpy(), np.minimum(p / s, most) * (np.log(p) - np.log(q)), atol=1e-12
        )
        (slope,) = torch.autograd.grad((sampler.exp() * tokens).sum(), student, retain_graph=True)
        np.testing.assert_allclose(slope.numpy(), s * np.minimum(p / s, most) * np.log(p / q), atol=1e-12)


def test_the_loss_tells_the_kl_and_its_ratio() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    columns = {"sampler_logprobs": torch.tensor([-1.0, -3.0]), "reference_logprobs": torch.tensor([-0.5, -4.0])}
    loss = ReverseKl()
    assert loss.columns == ("sampler_logprobs", "reference_logprobs")
    told = loss(logprobs, columns)
    assert told.values.tolist() == pytest.approx([-0.5, 2 * 2.0])
    assert told.metrics["teacher_kl"].tolist() == [-0.5, 2.0]
    assert told.metrics["ratio"].tolist() == pytest.approx([1.0, np.e])
    assert not any(each.requires_grad for each in told.metrics.values())


# --- the teacher ----------------------------------------------------------------------------------


def check(policy: object, teacher: object) -> None:
    check_teacher(PolicyConfig.model_validate({"model": policy}), TeacherConfig.model_validate({"model": teacher}))


def test_a_teacher_has_the_policys_tokens(tmp_path: Path) -> None:
    for name, characters in {"same": "abcd>", "other": "abdc>", "more": "abcd>e"}.items():
        character_tokenizer(characters, 16).save_pretrained(tmp_path / name)
    check(MODEL, str(tmp_path / "same"))
    check(str(tmp_path / "other"), "elsewhere")  # not on this machine
    with pytest.raises(ConfigError, match=r"'c' is token 4 of the policy and 5 of the teacher .7 and 7 tokens, 2 of"):
        check(MODEL, str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="'e' is token none of the policy and 7 of the teacher"):
        check(str(tmp_path / "same"), str(tmp_path / "more"))
    with pytest.raises(ConfigError, match=re.escape("is the policy's model, so there is nothing to learn from it")):
        check(MODEL, MODEL)
    (tmp_path / "same" / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a readable tokenizer: TypeError"):
        check(MODEL, str(tmp_path / "same"))


def test_a_teacher_is_named(tmp_path: Path) -> None:
    script = load_script(Path(__file__).parents[2] / "algorithms" / "distill.py")
    with pytest.raises(ConfigError, match=re.escape("mine.toml: teacher: is missing")):
        validate(script.schema, {"task": {"source": "x"}, "policy": {"model": "m"}}, "mine.toml")
