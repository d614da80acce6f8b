"""Cells of any source are what lines of JSON would hold, or are refused with the row and the column."""

import asyncio
import datetime as dt
import decimal
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import reasoning_gym
from pyarrow import parquet

import meshrl as rl
from meshrl import Batch, Task, TaskConfig
from meshrl.errors import DataError
from meshrl.tasks import RewardConfig, fill, load_function
from meshrl.tasks.function import FunctionReward
from meshrl_torch.train.one_rank import TorchPolicy

COLUMNS = {
    "gaps": pa.array([1.5, math.nan, None], pa.float64()),
    "score": pa.array([0.1, 2.5, None], pa.float32()),
    "scores": pa.array([[0.1, None], [], None], pa.list_(pa.float32())),
    "inner": pa.array([{"n": [0.1]}, {"n": None}, None], pa.struct({"n": pa.large_list(pa.float32())})),
    "map": pa.array([[("k", 0.1), ("l", None)], [], None], pa.map_(pa.string(), pa.float32())),
    "maps": pa.array([[[("k", [0.1])]], [], None], pa.list_(pa.map_(pa.string(), pa.list_(pa.float32())))),
    "half": pa.array([np.float16(0.1), None, None], pa.float16()),
    "large": pa.array([2**63, 1, None], pa.uint64()),
    "table": pa.array([{"n": math.nan}, {"n": 0.5}, None]),
    "list": pa.array([[math.nan, 0.5], [], None]),
}
AS_JSON = {
    "gaps": [1.5, None, None],
    "score": [0.1, 2.5, None],
    "scores": [[0.1, None], [], None],
    "inner": [{"n": [0.1]}, {"n": None}, None],
    "map": [{"k": 0.1, "l": None}, {}, None],
    "maps": [[{"k": [0.1]}], [], None],
    "half": [0.1, None, None],
    "large": [2**63, 1, None],
    "table": [{"n": None}, {"n": 0.5}, None],
    "list": [[None, 0.5], [], None],
}
PLAIN: list[tuple[object, object]] = [
    (np.float32(0.1), 0.1), (np.int64(3), 3), (np.bool_(True), True), (np.str_("a"), "a"),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]), (np.array([0.1], np.float32), [0.1]),
    (np.float64(math.nan), None), ({"inner": (math.nan, np.int8(1))}, {"inner": [None, 1]}),
]  # fmt: skip
REFUSED = [b"a", math.inf, np.float32(-math.inf), decimal.Decimal("1.5"), dt.date(2020, 1, 1), {1: "a"}, {"a"}]


def cells(row: Mapping[str, object]) -> object:
    (kept,) = Task.of([{"question": "q", "answer": "a", **row}]).train.objects("row")
    return kept


def judged(rows: Batch, reward: str) -> list[float]:
    function, columns = load_function(reward), (rows.objects("answer"), rows.objects("completion"))
    if reward == "exact_match":  # as a role does
        scored = asyncio.run(FunctionReward(RewardConfig(function=reward)).score(rows))
        return [*map(float, np.asarray(scored.rewards))]
    return [cast("float", function("", str(text), {"answer": answer})) for answer, text in zip(*columns, strict=True)]


def test_a_parquet_file_has_the_rows_of_the_same_lines_of_json(tmp_path: Path) -> None:
    questions = {"question": ["a", "b", "c"], "answer": ["1", "2", "3"]}
    parquet.write_table(pa.table({**questions, **COLUMNS}), tmp_path / "rows.parquet")
    whole = {**questions, **AS_JSON}
    rows = [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    one, other = (
        Task.load(TaskConfig(source=str(tmp_path / f"rows.{kind}"), held_out=0)) for kind in ("parquet", "jsonl")
    )
    assert one.train.drop("place") == other.train.drop("place")
    assert list(one.train.objects("row")) == rows


@pytest.mark.parametrize(("value", "plain"), PLAIN)
def test_a_row_in_memory_is_plain(value: object, plain: object) -> None:
    kept = cells({"cell": value})
    assert kept == {"question": "q", "answer": "a", "cell": plain}
    assert json.loads(json.dumps(kept)) == kept


@pytest.mark.parametrize("value", REFUSED)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"rows, row 0: `cell`\[inner\] is .*, of the type"):
        cells({"cell": {"inner": [value]}})


UNHELD: list[tuple[object, Any, str]] = [
    (b"a", pa.binary(), "` is .*, of the type bytes"),
    (b"a", pa.large_binary(), "` is .*, of the type bytes"),
    (b"a", pa.binary(1), "` is .*, of the type bytes"),
    ([b"a"], pa.list_(pa.binary()), "` is .*, of the type bytes"),
    (dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None, "` is .*, of the type datetime"),
    (dt.date(2020, 1, 1), pa.date32(), "` is .*, of the type date"),
    (decimal.Decimal("1.5"), pa.decimal128(2, 1), "` is .*, of the type Decimal"),
    (
        [{"at": dt.date(2020, 1, 1)}],
        None,
        r"`\[at\] is .*, of the type date: .*Write it as text, or leave the column",
    ),
]


@pytest.mark.parametrize(("value", "kind", "said"), UNHELD)
def test_a_column_of_what_no_row_holds_is_refused_by_its_name(
    tmp_path: Path, value: object, kind: Any, said: str
) -> None:
    columns = {"question": ["a"], "answer": ["1"], "when": pa.array([value], kind)}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=rf"rows\.parquet, row 0: `when{said}"):
        Task.load(TaskConfig(source=str(tmp_path / "rows.parquet"), held_out=0))


def test_a_map_is_a_table_and_has_a_key_once(tmp_path: Path) -> None:
    kind, source = pa.map_(pa.string(), pa.string()), str(tmp_path / "rows.parquet")
    for pairs in ([("a", "b")], [("a", "b"), ("a", "c")]):
        parquet.write_table(pa.table({"question": ["q"], "answer": pa.array([pairs], kind)}), source)
        config = TaskConfig(source=source, answer="{answer[a]}", held_out=0)
        if len(pairs) == 1:
            assert Task.load(config).train.objects("answer") == ("b",)
            continue
        with pytest.raises(
            DataError, match=r"rows\.parquet, row 0: `answer`: a map has the key 'a' twice: write it as a list"
        ):
            Task.load(config)


def test_an_infinite_number_and_a_nan_are_refused_with_their_line(tmp_path: Path) -> None:
    table = {"question": ["a", "b"], "answer": ["1", "2"], "score": [1.0, math.inf]}
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: `score` is inf"):
        Task.load(TaskConfig(source=str(tmp_path / "rows.parquet"), held_out=0))
    lines = '{"question": "a", "answer": "1"}\n{"question": "b", "answer": NaN}\n'
    (tmp_path / "rows.jsonl").write_text(lines, "utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: not JSON: .*; write null for NaN"):
        Task.load(TaskConfig(source=str(tmp_path / "rows.jsonl"), held_out=0))


TEXTS: list[tuple[str, object, str]] = [
    ("{cell}", 2.0, "2"), ("{cell}", -0.0, "0"), ("{cell}", 1e3, "1000"), ("{cell}", 2.5, "2.5"), ("{cell}", None, ""),
    ("{cell}", 1e300, "1e+300"), ("{cell}", 10**23, "1" + "0" * 23), ("{cell}", True, "True"), ("<{cell}>", 2.0, "<2>"),
    ("{cell}", [3.0, 1, 2.5], "[3, 1, 2.5]"), ("{cell}", [[1.0, None], []], "[[1, None], []]"),
    ("{cell:.2f}", 2.0, "2.00"), ("{cell[n]}", {"n": 7.0}, "7"), ("{cell[1]}", ["a", "b"], "b"),
    ("{cell!s}", ["a"], "['a']"), ("{{{cell}}}", "x", "{x}"), ("{my key}", None, "x"), ("fixed", None, "fixed"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "cell", "text"), TEXTS)
def test_a_cell_is_one_text_in_prompts_answers_and_other_templates(template: str, cell: object, text: str) -> None:
    row = {"cell": cell, "q": "?", "my key": "x"}
    assert fill(template, row, "here") == text
    if text:
        assert Task.of([row], prompt=f"q{template}", answer="").train.objects("prompt") == (f"q{text}",)
    if not isinstance(cell, list):
        assert Task.of([row], prompt="{q}", answer=template).train.objects("answer") == (text,)


def test_whole_numbers_of_a_column_with_gaps_are_the_answers_that_a_model_gives(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": [2.0, None]}), tmp_path / "rows.parquet")
    task = Task.load(TaskConfig(source=str(tmp_path / "rows.parquet"), held_out=0))
    assert task.train.objects("answer") == ("2", "")
    assert judged(task.train.assign(completion=[" 2 ", ""]), "exact_match")[0] == 1


@pytest.mark.parametrize("value", [["a", "b"], [{"n": 1}], {"n": 1}, [["a"]], ["a", 1]])
@pytest.mark.parametrize("key", ["prompt", "rejected", "message"])
def test_a_list_of_texts_and_a_table_are_no_text(tmp_path: Path, key: str, value: object) -> None:
    rows: list[dict[str, object]] = [{"question": "a", "more": "b"}, {"question": "c", "more": value}]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    table = {"source": str(source), "answer": "", "held_out": 0}
    wrong = r"(line 2|row 1)\b.*: the template '.*{more}' does not fit the row: 'more' is a (list|table), .*{more\["
    if key == "message":
        table |= {"prompt": "{question}", "dialogues": [[{"role": "user", "content": "{more}"}]]}
    elif key == "prompt":
        table |= {"prompt": "{question} {more}"}
    with pytest.raises(DataError, match=wrong if key != "rejected" else wrong.partition(")")[2]):
        rl.rejected_answers(Task.load(TaskConfig.model_validate(table)).train, "{more}")


@pytest.mark.parametrize(
    ("answers", "reward", "right", "wrong"),
    [
        (["Paris", "paris"], "exact_match", ["Paris", " paris\n"], ["PARIS", "['Paris', 'paris']", ""]),
        ([2.0, 3], "exact_match", ["2", "3"], ["2.0", "[2, 3]"]),
        (["", None, "4"], "exact_match", ["4"], ["", "None"]),
        (["1/2", "half of it"], "numeric_answer", ["0.5", r"\boxed{\frac12}"], ["2"]),
        ([10, 12], "numeric_answer", ["10", "12"], ["22", "1012"]),
        ([r"\frac{\pi}{2}", r"\pi"], "math_answer", [r"$\frac{\pi}{2}$", r"\boxed{\pi}"], ["$2$"]),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_list_of_accepted_answers(
    tmp_path: Path, kind: str, answers: list[object], reward: str, right: list[str], wrong: list[str]
) -> None:
    row = {"question": "q", "inner": {"answer": answers}}
    if kind == "parquet" and len(set(map(type, answers))) == 1:
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    else:
        kind = "jsonl"
        (tmp_path / "rows.jsonl").write_text(json.dumps(row), "utf-8")
    task = Task.load(TaskConfig(source=str(tmp_path / f"rows.{kind}"), answer="{inner[answer]}", held_out=0))
    given = [*right, *wrong]
    rows = task.train.select([0] * len(given)).assign(completion=given)
    assert judged(rows, reward) == [1.0] * len(right) + [0.0] * len(wrong)
    assert rl.learned_answers(task.train) == [str(answers[0]).removesuffix(".0") or "4"]


@pytest.mark.parametrize("answer", [["a", ["b"]], [{"value": "a"}]])
def test_accepted_answers_are_texts_and_numbers(answer: object) -> None:
    with pytest.raises(DataError, match=r"rows, row 0: answer: .*'answer\[\d\]' is a (list|table)"):
        Task.of([{"question": "q", "answer": answer}])


@pytest.mark.parametrize("answer", [None, "", " ", [], [None], math.nan])
def test_nothing_is_learned_of_a_row_without_an_answer(answer: object) -> None:
    good = {"question": "a", "answer": "1", "label": True}
    rows = Task.of([good, {"question": "b", "answer": answer, "label": True}]).train
    for learn in (
        rl.learned_answers,
        lambda rows: rl.answer_pairs(rows, ["2", "3"]),
        lambda rows: rl.labelled(rows, "label"),
    ):
        with pytest.raises(DataError, match="row 1 has no answer to learn, which is null or blank"):
            learn(rows)
    bad = Task.of([good, {"question": "b", "answer": answer, "label": False}]).train
    assert list(rl.labelled(bad, "label").objects("completion")) == ["1", ""]
    assert judged(rows.assign(completion=["1", ""]), "exact_match")[0] == 1


@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ("{question}", {"question": None}),
        ("{question}", {"question": " \n"}),
        ("Q: {question}\nA:", {"question": math.nan}),
        ("{question}{metadata[more]}", {"question": "", "metadata": {"more": None}}),
    ],
)
def test_an_empty_prompt_is_named_by_its_row(prompt: str, row: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"rows, row 1: the prompt is empty, as the row has nothing in question"):
        Task.of([{"question": "a", "metadata": {"more": ""}}, row], prompt=prompt, answer="")


def test_a_part_of_a_prompt_may_be_empty_and_so_may_one_without_keys() -> None:
    rows = [{"question": "a", "more": None}, {"question": None, "more": "b"}]
    assert Task.of(rows, prompt="{question} {more}", answer="").train.objects("prompt") == ("a ", " b")
    assert Task.of(rows, prompt="", answer="").train.objects("prompt") == ("", "")


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(DataError, match=r"rows, row 1: prompt: the template .* can't encode character"):
        Task.of([{"question": "a", "answer": "1"}, {"question": "\ud800", "answer": "1"}])


@pytest.mark.parametrize("name", ["graph_color", "gsm_symbolic"])
def test_rows_of_reasoning_gym_stay_what_its_own_scores_read(name: str) -> None:
    task = Task.load(TaskConfig(source=f"reasoning_gym:{name}", options={"size": 3}, held_out=0))
    assert task.train.objects("row") == tuple(reasoning_gym.create_dataset(name, size=3, seed=0))


async def test_the_nulls_that_parquet_fills_in_change_no_dialogue(tmp_path: Path) -> None:
    shown = "{{ m.role[0] }}{% if 'name' in m %}({{ m.name }}){% endif %}:{{ m.content }};"
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    said = [{"role": "user", "content": "a", "name": "b"}, {"role": "assistant", "content": "c"}]
    row = {"question": "q", "answer": "", "messages": said}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    task = Task.load(TaskConfig(source=str(tmp_path / "rows.parquet"), held_out=0))
    (filled,) = task.train.objects("row")
    model = rl.NewModel(characters="abcnu():;q ", chat_template=template)
    policy = TorchPolicy(rl.PolicyConfig(model=model, chat=True))
    rows = Batch.of(messages=[said, cast("dict[str, object]", filled)["messages"]])
    tokens = (await policy.encode(rows)).tokens
    assert tokens[0].tolist() == tokens[1].tolist()
