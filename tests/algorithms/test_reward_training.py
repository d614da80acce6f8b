"""The scripts that train reward models: on a fake as they ship, and on the torch backend, where they learn."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from meshrl import (
    Batch,
    DataError,
    MeshConfig,
    Run,
    RunConfig,
    labelled_steps,
    least_margins,
    score_columns,
    with_labels,
)
from meshrl.config import validate
from meshrl.mesh import INLINE_BYTES
from meshrl.roles import RewardTrainingConfig
from meshrl.run.jobs import load_script
from meshrl.testing import FakeRewardModel

_ALGORITHMS = Path(__file__).parents[2] / "algorithms"
FAKE = {"backend": "fake", "model": "none"}
PAGES: dict[str, Mapping[str, object]] = {
    "reward_model": {"rejected": "{worse}", "margin": "by"},
    "process_reward": {},
}


async def run_page(
    name: str, folder: Path, config: Mapping[str, object], inline_bytes: int = INLINE_BYTES, resume: bool = False
) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
    """The summary and the recorded steps of a run."""
    script = load_script(_ALGORITHMS / f"{name}.py")
    resolved = validate(script.schema, config, "test")
    meshes = {"main": MeshConfig(cpus=1)}
    keys = RunConfig(
        folder=str(folder), name=name, inline_bytes=inline_bytes, meshes=meshes, checkpoint_every=5, resume=resume
    )
    async with Run(keys) as run:
        await script.function(run, resolved)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / name / "summary.json").read_bytes()), [json.loads(line) for line in lines]


def task(folder: Path, rows: list[dict[str, object]], **chosen: object) -> dict[str, object]:
    """A task of these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(path), **chosen}


@pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])
@pytest.mark.parametrize("name", PAGES)
async def test_a_page_runs_on_a_fake(name: str, inline_bytes: int, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "question": f"{n}+1=",
            "answer": f"{n + 1}.",
            "worse": f"{n}.",
            "by": n % 3 / 2,
            "completions": [f"{n + n % 2}", "."],
            "labels": [n % 2 == 1, n % 2 == 1],
        }
        for n in range(200)
    ]
    given = {"task": task(tmp_path, rows, held_out=16, held_out_fraction=0.2), "reward": FAKE, "rows": 8, "steps": 10}
    summary, steps = await run_page(name, tmp_path, {**given, **PAGES[name]}, inline_bytes)
    assert summary["held_out_accuracy_before"] < 1
    assert summary["held_out_accuracy_after"] == 1
    assert len(steps) == 10
    assert {"loss", "rows"} <= set(steps[0])
    if name == "reward_model":
        assert steps[0]["margin"] == 0
        assert steps[9]["margin"] == pytest.approx(1.8, rel=1e-5)


MODEL = {"characters": "ab>", "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
LEARNS = {"reward": {"model": MODEL, "optimizer": {"lr": 1e-2}}, "rows": 24, "steps": 25}


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_learns_on_torch_and_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Prompts of a and b, of which answers of b alone are good; a step is right up to the first a."""
    words = [f"{number:06b}".replace("0", "a").replace("1", "b") for number in range(64)]
    rows: list[dict[str, object]] = [
        {
            "question": f"{word}>",
            "answer": "bbb",
            "worse": "bab",
            "by": 0.5,
            "completions": list(word[:3]),
            "labels": [word[: at + 1].count("a") == 0 for at in range(3)],
        }
        for word in words
    ]
    given = {"task": task(tmp_path, rows, held_out=8, held_out_fraction=0.3), **LEARNS, **PAGES[name]}
    summary, steps = await run_page(name, tmp_path, given)
    assert all(step.get("drift", 0) < 1e-5 for step in steps)
    assert summary["held_out_accuracy_after"] > 0.8
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert (tmp_path / name / "model" / "config.json").exists()
    again, later = await run_page(name, tmp_path, {**given, "steps": 30}, resume=True)
    assert again["held_out_accuracy_before"] == summary["held_out_accuracy_before"]
    assert [step["loss"] for step in later[:25]] == [step["loss"] for step in steps]
    assert len(later) == 30


async def test_pairs_that_are_none_are_refused() -> None:
    model = FakeRewardModel(RewardTrainingConfig(model="none"))
    pairs = Batch.of(prompt=["a", "a"], completion=["b", "c"], answer=["b", "b"], groups=np.zeros(2, np.int64))
    encoded = await model.encode(pairs.assign(preferred=np.array([1, -1], np.int8)))
    scored = await score_columns(await model.token_scores(encoded))
    assert not scored.row("least_margins").any()
    with pytest.raises(DataError, match="a pair is two rows of one group"):
        await score_columns(await model.token_scores(encoded.assign(preferred=np.array([1, 1], np.int8))))
    steps = await model.encode(pairs.assign(steps=[("b", "c"), ("c",)], preferred=np.array([1, -1], np.int8)))
    with pytest.raises(DataError, match="row 0 of the pairs is scored at 2 tokens, and a text of a pair has one score"):
        await score_columns(await model.token_scores(steps))
    with pytest.raises(DataError, match="row 1 is scored at 1 tokens and has 2 labels"):
        await with_labels(steps.assign(step_labels=[(1.0, 0.0), (1.0, 0.0)]))


def test_rows_give_margins_steps_and_labels() -> None:
    def of(**row: object) -> Batch:
        return Batch.of(prompt=["ab>"], answer=["ba"], row=[row])

    assert least_margins(of(by=0.5), "by").tolist() == [0.5]
    assert least_margins(of(), "").tolist() == [0]
    for wrong in ("much", -1, None, True, float("nan")):
        with pytest.raises(DataError, match="the least margin of a pair is a number, at least 0"):
            least_margins(of(by=wrong), "by")
    told = labelled_steps(of(parts=["b", "a"], right=[True, 0.25]), "parts", "right")
    assert told.objects("steps") == (("b", "a"),)
    assert told.objects("step_labels") == ((1.0, 0.25),)
    for parts, right, wrong in (
        ("ba", [1], "give a list of texts"),
        ([], [], "give a list of texts"),
        ([1], [1], "each step must be a text"),
        (["b"], [1, 0], "1 steps and right"),
        (["b"], [2], "has the label 2"),
        (["b"], ["good"], "has the label 'good'"),
    ):
        with pytest.raises(DataError, match=wrong):
            labelled_steps(of(parts=parts, right=right), "parts", "right")


def test_steps_are_made_of_answers() -> None:
    prompts = [f"{number}>" for number in range(50)]
    made = labelled_steps(Batch.of(prompt=prompts, answer=["abcd"] * 50), "", "labels")
    alone = labelled_steps(Batch.of(prompt=prompts, answer=["a"] * 50), "", "labels")
    assert set(alone.objects("steps")) == {("a",)}
    texts = ["".join(cast("tuple[str, ...]", steps)) for steps in made.objects("steps")]
    assert 10 < texts.count("abcd") < 40
    for text, labels in zip(texts, made.objects("step_labels"), strict=True):
        wrong = next((at for at, pair in enumerate(zip(text, "abcd", strict=True)) if pair[0] != pair[1]), 4)
        assert labels == tuple([1.0] * wrong + [0.0] * (4 - wrong))
