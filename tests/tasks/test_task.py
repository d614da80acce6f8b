"""Tasks: sources, templates, what is held out, and batches."""

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from meshrl.errors import DataError
from meshrl.tasks import Task, TaskConfig, first_row

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(*rows: object) -> str:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), "utf-8")
        return str(path)

    return to_file


def sums(count: int) -> list[dict[str, object]]:
    return [{"question": f"{n}+1=", "answer": str(n + 1), "metadata": {"n": n}} for n in range(count)]


def test_a_json_lines_file(write: Write) -> None:
    more: list[dict[str, object]] = [{"question": "a", "answer": None}, {"question": "b", "answer": 2}]
    task = Task.load(TaskConfig(source=write(*sums(3), *sums(2), *more), held_out=0))
    assert task.train.objects("prompt") == ("0+1=", "1+1=", "2+1=", "0+1=", "1+1=", "a", "b")
    assert task.train.objects("answer") == ("1", "2", "3", "1", "2", "", "2")
    assert task.train.objects("row") == (*sums(3), *sums(2), *more)
    assert len(task.held_out) == 0
    assert task.held_out.names == task.train.names


def test_the_task_that_comes_along_has_the_rows_of_reasoning_gym() -> None:
    options = {"min_word_len": 4, "max_word_len": 7, "size": 300, "seed": 5}
    own = TaskConfig(source="meshrl:spell_backward", options=options, prompt="{word}>", held_out=9)
    other = TaskConfig(source="reasoning_gym:spell_backward", options=options, prompt="{metadata[word]}>", held_out=9)
    ours, theirs = Task.load(own), Task.load(other)
    assert ours.train.only("prompt", "answer") == theirs.train.only("prompt", "answer")
    assert ours.held_out.only("prompt", "answer") == theirs.held_out.only("prompt", "answer")
    assert len(theirs.held_out) == 9
    assert [f"{answer}"[::-1] + ">" for answer in ours.train.objects("answer")] == list(ours.train.objects("prompt"))
    seedless = other.model_copy(update={"options": {"size": 200}})
    assert Task.load(seedless).train == Task.load(seedless).train, "without a seed of one's own, too"


def test_dialogues_of_templates(write: Write) -> None:
    tells = [{"role": "user", "content": "{question}"}, {"role": "assistant", "content": '{{"n": {metadata[n]}}}'}]
    asks = [{"role": "user", "content": "{answer}"}, {"role": "tool", "content": "?"}]
    config = TaskConfig.model_validate({"source": write(*sums(3)), "held_out": 0, "dialogues": [tells, asks]})
    rows = cast("list[list[dict[str, str]]]", list(Task.load(config).train.objects("messages")))
    texts = [[message["content"] for message in row] for row in rows]
    assert texts == [["0+1=", '{"n": 0}'], ["2", "?"], ["2+1=", '{"n": 2}']]
    wrong = [[{"role": "user", "content": "{questions}"}]]
    with pytest.raises(DataError, match=r"line 1: message 0: the template '{questions}' needs 'questions'"):
        Task.load(TaskConfig.model_validate({"source": write(*sums(2)), "dialogues": wrong}))


def test_held_out_prompts_are_apart_and_stay_so(write: Write) -> None:
    def split(rows: list[dict[str, object]], held_out: int) -> tuple[set[object], set[object]]:
        config = TaskConfig(source=write(*rows), held_out=held_out, held_out_fraction=0.3)
        task = Task.load(config)
        assert len(task.held_out) == held_out
        return set(task.train.objects("prompt")), set(task.held_out.objects("prompt"))

    train, held_out = split(sums(200), 40)
    assert not train & held_out
    assert 110 < len(train) < 170
    # Fewer are judged by, and a longer file in another order: nothing that was held out is trained on.
    fewer_train, fewer = split(sums(200), 10)
    assert fewer < held_out
    assert fewer_train == train
    more_train, _ = split(sums(400)[::-1], 40)
    assert not more_train & held_out
    assert train < more_train
    with pytest.raises(DataError, match="no prompt is left to train on"):
        Task.load(TaskConfig(source=write(*sums(1)), held_out=1, held_out_fraction=0.999999))


def test_batches_deal_each_prompt_once_an_epoch(write: Write) -> None:
    task = Task.load(TaskConfig(source=write(*sums(10)), held_out=0))
    batches = list(islice(task.batches(4, seed=0), 5))
    assert [len(batch) for batch in batches] == [4] * 5
    dealt = [prompt for batch in batches for prompt in batch.objects("prompt")]
    assert sorted(map(str, dealt[:10])) == sorted(map(str, dealt[10:])) == sorted(f"{n}+1=" for n in range(10))
    assert dealt[:10] != dealt[10:]
    assert np.concatenate([batch.groups for batch in batches]).tolist() == list(range(20))
    assert batches[0].groups.dtype == np.int64


def test_a_seed_repeats_the_batches_which_may_be_larger_than_the_data(write: Write) -> None:
    task = Task.load(TaskConfig(source=write(*sums(3)), held_out=0))
    first, again, other = (list(islice(task.batches(7, seed), 4)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [len(set(batch.groups.tolist())) for batch in first] == [7] * 4
    with pytest.raises(DataError, match="batches of 0 rows"):
        next(task.batches(0, seed=0))


def test_what_does_not_fit_is_told_with_its_file_and_line_and_a_check_reads_the_first_row_alone(write: Write) -> None:
    source = write(*sums(2), "oops")
    spell = {"min_word_len": 7, "max_word_len": 4}
    cases: list[tuple[dict[str, object], str]] = [
        ({"prompt": "{metadata[word]}"}, r"data\.jsonl, line 1: prompt: .*needs 'word', which the row lacks"),
        ({"prompt": "{}"}, "does not fit the row"),
        ({"prompt": "{question.size}"}, "does not fit the row"),
        ({"prompt": "{question:d}"}, "does not fit the row"),
        ({"source": "meshrl:spell_backward", "options": spell}, "it has no rows"),
        ({"source": "reasoning_gym:zzzzzzzz"}, "no dataset of this name among its"),
        ({"source": "reasoning_gym:spell_backward", "options": spell}, "do not fit: max_word_len must be >="),
    ]
    for table, message in cases:
        for read in (Task.load, first_row):
            with pytest.raises(DataError, match=message):
                read(TaskConfig.model_validate({"source": source, "held_out": 0, **table}))
    first_row(TaskConfig(source=source))


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"needs reasoning_gym: pip install 'meshrl\[tasks\]'"):
        first_row(TaskConfig(source="reasoning_gym:spell_backward"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").touch()
    with pytest.raises(DataError, match=r"need pyarrow: pip install 'meshrl\[tasks\]'"):
        first_row(TaskConfig(source=str(tmp_path / "x.parquet")))
