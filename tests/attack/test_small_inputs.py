"""Files and configurations that are damaged, or that ask for what no machine has: an error in words, with its place."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from meshrl.config import load_toml
from meshrl.errors import ConfigError, DataError
from meshrl.run import find_config, load_job
from meshrl.tasks import Task, TaskConfig, first_row

GOOD = b'{"question": "a", "answer": "b"}\n'
MARK = b"\xef\xbb\xbf"


def load(path: Path) -> Task:
    return Task.load(TaskConfig(source=str(path), held_out=0))


def test_a_line_that_is_no_row_is_told_with_its_place(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for line, says in {
        b'{"question": "\xff", "answer": "b"}': "byte 15 is 0xff, which is not UTF-8: save the file as UTF-8",
        b'{"\xff": 1}': "byte 3 is 0xff, which is not UTF-8",
        b'{"question": ' + b"[" * 100_000: "lists and tables are nested more than 100 deep",
        b'{"question": ' + b"[" * 100 + b"]" * 100 + b', "answer": "b"}': "more than 100 deep: flatten the row",
        b'{"question": NaN}': "not JSON",
        MARK + GOOD: "not JSON",
    }.items():
        rows.write_bytes(GOOD + line + b"\n")
        with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{says}"):
            load(rows)
    rows.write_bytes(b'{"question": ' + b"[" * 99 + b"]" * 99 + b', "answer": "b"}\n')
    assert len(load(rows).train) == 1
    rows.write_bytes(MARK + GOOD)
    assert load(rows).train.objects("prompt") == ("a",), "a mark at the start is no part of it"


def test_a_configuration_that_is_no_toml_is_told_in_words(tmp_path: Path) -> None:
    for text, says in {
        b'steps = 1\nname = "\xff"\n': "not valid TOML: line 2 has the byte 0xff, which is not UTF-8",
        b"a = " + b"[" * 100_000: "lists and tables are nested more than 100 deep",
        b".".join([b"a"] * 200) + b" = 1\n": "more than 100 deep: make it flatter",
        b"a = " + b"9" * 5000: "not valid TOML",
    }.items():
        (tmp_path / "run.toml").write_bytes(text)
        with pytest.raises(ConfigError, match=rf"run\.toml: .*{says}"):
            load_toml(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_bytes(MARK + b"steps = 1\n")
    assert load_toml(tmp_path / "run.toml") == {"steps": 1}
    with pytest.raises(ConfigError, match=r"command line: .* more than 100 deep"):
        load_toml(tmp_path / "run.toml", [".".join(["a"] * 5000) + "=1"])
    assert load_toml(tmp_path / "run.toml", ["a=" + "[" * 100_000])["a"] == "[" * 100_000


def write_parquet(path: Path, **columns: object) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), path)


def test_a_column_that_no_row_can_hold_is_told_with_its_name(tmp_path: Path) -> None:
    table: list[tuple[object, str]] = [
        (datetime(2020, 1, 1, tzinfo=UTC), r"is of timestamp\[us, tz=UTC\], and a row cannot hold a date or time"),
        (date(2020, 1, 1), r"is of date32\[day\], and a row cannot hold a date or time"),
        (Decimal("1.5"), ".* cannot hold a decimal"),
        ([{"at": date(2020, 1, 1)}], ".* cannot hold a date or time: .* Write the column as text, or leave it out"),
    ]
    for value, says in table:
        write_parquet(tmp_path / "rows.parquet", question=["a"], answer=["b"], when=[value])
        with pytest.raises(DataError, match=rf"rows\.parquet: column 'when' {says}"):
            load(tmp_path / "rows.parquet")


def test_a_parquet_file_that_is_damaged_anywhere_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, question=[f"prompt {number}" for number in range(3000)], answer=["b"] * 3000)
    whole = path.read_bytes()
    refused: list[str] = []
    for place in range(4, len(whole), len(whole) // 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            load(path)
        except DataError as error:
            refused.append(str(error))
        path.write_bytes(whole[:place])
        with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as a parquet file from row 0 on: "):
            load(path)
    assert len(refused) > 20
    assert all("rows.parquet: " in each for each in refused)


def test_an_option_of_another_type_is_told_with_its_key() -> None:
    pytest.importorskip("reasoning_gym")
    table: list[tuple[dict[str, object], str]] = [
        ({"size": {}}, r"task\.options\.size = \{\}: Expected `int`, got `object`"),
        ({"size": "many"}, r"task\.options\.size = 'many': Expected `int`, got `str`"),
        ({"size": 10**9}, r"task\.options\.size = 1000000000: a task has at most 10,000,000 rows"),
        ({"seed": {}}, r"task\.options\.seed = \{\}: Expected `int \| null`, got `object`"),
    ]
    for options, says in table:
        given = TaskConfig.model_validate({"source": "reasoning_gym:chain_sum", "options": options})
        for read in (first_row, Task.load):
            with pytest.raises(ConfigError, match=rf"^reasoning_gym:chain_sum: {says}"):
                read(given)
    # An option is taken whose type the dataset declares wrongly.
    options = {"variables": ["x", "y", "z"], "size": 3}
    wrong = {"source": "reasoning_gym:polynomial_multiplication", "options": options, "held_out": 0}
    assert len(Task.load(TaskConfig.model_validate(wrong)).train) == 3


def test_numbers_that_no_machine_holds_are_refused_before_memory_is_taken() -> None:
    for override, says in {
        "sampling.n=1000000000": r"sampling\.n = 1000000000: must be less than or equal to 65536",
        "sampling.n=1e9": r"sampling\.n = 1000000000\.0: must be a whole number",
        "sampling.max_tokens=1000000000": r"sampling\.max_tokens = 1000000000: must be less than or equal to 16777216",
        "prompts=1000000": r"1,000,000 prompts with sampling\.n = \d+ are [\d,]+ rows in a step, .* 4,194,304",
        "evaluation={every = 1, n = 1000000000}": r"evaluation\.n = 1000000000: must be less than or equal to 65536",
        "run.meshes.main.ranks=1000000000": r"run\.meshes\.main\.ranks = 1000000000: must be less than or equal to",
    }.items():
        with pytest.raises(ConfigError, match=says):
            load_job(find_config("grpo/quickstart"), [override])
