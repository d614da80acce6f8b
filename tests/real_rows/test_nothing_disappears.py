"""Rows stay rows, and what a run leaves out is counted in the check, the log and the summary."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import meshrl as rl
from meshrl import Task, TaskConfig
from tests.first_hour.terminal import done

VOTES: list[dict[str, object]] = [
    {"question": f"{n % 4}+1=", "answer": str(n), "label": n % 2 == 0, "rejected": str(-n)} for n in range(12)
]
SAME: list[dict[str, object]] = [{"question": "q", "answer": "a"}] * 5
KTO = """algorithm = "kto"
rows = 4
steps = 3
run.name = "mine"
task = { source = "rows.jsonl", held_out = 1, held_out_fraction = 0.6 }
sampling.max_tokens = 4
policy.model.characters = "0123456789+=-"
policy.backend = "fake"
sampler.backend = "fake"
reference.backend = "fake"
"""


def of_memory(rows: list[dict[str, object]]) -> Task:
    return Task.of(rows)


def of_jsonl(rows: list[dict[str, object]], **table: object) -> Task:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return Task.load(TaskConfig.model_validate({"source": "rows.jsonl", "held_out": 0, **table}))


def of_parquet(rows: list[dict[str, object]]) -> Task:
    parquet.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    return Task.load(TaskConfig(source="rows.parquet", held_out=0))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("load", [of_memory, of_jsonl, of_parquet])
@pytest.mark.parametrize("rows", [VOTES, SAME])
def test_rows_with_equal_prompts_are_all_learned_from(load: Callable[..., Task], rows: list[dict[str, object]]) -> None:
    task = load(rows)
    assert task.train.objects("row") == tuple(rows)
    assert task.left_out == {}
    (epoch,) = islice(task.batches(len(rows), seed=0), 1)
    assert Counter(epoch.objects("answer")) == Counter(row["answer"] for row in rows)
    assert sorted(epoch.groups.tolist()) == [*range(len(rows))]


def test_votes_and_pairs_of_equal_prompts_keep_their_own_labels_and_rejected_texts() -> None:
    train = of_jsonl([*VOTES]).train
    assert rl.labelled(train, "label").row("desirable").tolist() == [True, False] * 6
    assert rl.rejected_answers(train, "{rejected}") == [str(-n) for n in range(12)]


def test_equal_prompts_are_held_out_together_and_the_rest_of_those_set_apart_is_counted() -> None:
    task = of_jsonl([*VOTES], held_out=1, held_out_fraction=0.6)
    parts = [set(part.objects("prompt")) for part in (task.train, task.held_out)]
    assert not parts[0] & parts[1]
    assert (len(parts[1]), len(task.held_out)) == (1, 3), "a prompt with all its rows"
    assert len(task.train) + len(task.held_out) + task.left_out["set_apart"] == 12
    every = of_jsonl([*VOTES], held_out="all", held_out_fraction=0.6)
    assert (every.train, len(every.train) + len(every.held_out), every.left_out) == (task.train, 12, {})


@pytest.mark.parametrize("source", ["meshrl:spell_backward", "reasoning_gym:spell_backward"])
def test_what_a_generator_draws_again_is_one_row_and_is_counted(source: str) -> None:
    options = {"size": 300, "min_word_len": 3, "max_word_len": 3}
    task = Task.load(TaskConfig.model_validate({"source": source, "options": options, "held_out": 0}))
    assert task.left_out == {"repeated": 300 - len(task.train)}
    assert len(set(task.train.objects("prompt"))) == len(task.train) < 300


def test_a_check_the_log_and_the_summary_say_what_is_left_out() -> None:
    task = of_jsonl([*VOTES], held_out=1, held_out_fraction=0.6)
    Path("mine.toml").write_text(KTO, "utf-8")
    told = (
        f"rows.jsonl: {task.left_out['set_apart']} of 12 prompts are left out: task.held_out_fraction = 0.6 sets more"
    )
    assert told in done("check", "mine.toml").told
    assert done("run", "mine.toml").told.count(told) == 1
    assert json.loads(Path("runs/mine/summary.json").read_text("utf-8"))["left_out"] == task.left_out
    assert "left out" not in done("check", "mine.toml", "task.held_out=0").told
    done("run", "mine.toml", "task.held_out=0", "run.name=all")
    assert "left_out" not in json.loads(Path("runs/all/summary.json").read_text("utf-8"))


async def test_the_summary_adds_what_several_tasks_leave_out() -> None:
    tasks = [of_jsonl([*VOTES], held_out=1, held_out_fraction=fraction) for fraction in (0.6, 0.8)]
    async with rl.Run(rl.RunConfig(name="two")):
        for task in [*tasks, tasks[0]]:
            next(task.batches(2, seed=0))
    wanted = {"set_apart": sum(task.left_out["set_apart"] for task in tasks)}
    assert json.loads(Path("runs/two/summary.json").read_text("utf-8"))["left_out"] == wanted
