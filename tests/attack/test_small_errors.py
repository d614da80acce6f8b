"""What a user's code raises that no error should be, a full disk, damaged files and configurations, keys of serving."""

import asyncio
import gc
import re
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import tomli_w
from pyarrow import parquet
from structlog.testing import capture_logs

from meshrl import Actor, LocalEngine, Mesh, Metrics, Resources, Run, RunConfig, endpoint
from meshrl.config import load_toml
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, ModelError, RankFailed
from meshrl.roles import ServerAddress
from meshrl.run import find_config, load_job, serve
from meshrl.tasks import RewardConfig, Task, TaskConfig, first_row
from meshrl.tasks.function import FunctionReward
from meshrl.testing import FakeRun
from meshrl_vllm import guard


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def silent(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise Silent("x")


def half(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise ValueError("half of a pair: \ud800")


def gives_up(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise asyncio.CancelledError("of its own")


async def gives_up_later(prompt: str, completion: str, row: dict[str, object]) -> float:
    await asyncio.sleep(0)
    raise asyncio.CancelledError("of its own")


SAYS = {
    "silent": "Silent: (its text cannot be made: str() raised RuntimeError)",
    "half": "ValueError: half of a pair: \\ud800",
    "gives_up": "CancelledError: of its own",
    "gives_up_later": "CancelledError: of its own",
}


async def test_what_a_reward_raises_is_of_its_row(tmp_path: Path) -> None:
    batch = Batch.of(prompt=["a", "b"], completion=["c", "d"])
    for name, seconds in ((name, seconds) for name in SAYS for seconds in (None, 600.0)):
        config = RewardConfig(function=f"{__file__}:{name}", row_timeout=seconds)
        with capture_logs() as logs:
            async with Run(RunConfig(folder=str(tmp_path), name=f"{name}-{seconds}", samples_every=1)) as run:
                reward = await (await run.mesh(1)).spawn(FunctionReward, config)
                scored = await reward.score(batch)
                with pytest.raises(
                    DataError, match=f"none of the 2 rows of a step was judged, .*{re.escape(SAYS[name])}"
                ):
                    await run.record(Metrics.of(loss=(1.0, 1.0)), scored)
                judged = scored.assign(rewards=np.zeros(2, np.float32), reward_error=[None, None])
                await run.record(Metrics.of(loss=(1.0, 1.0)), Batch.concat([scored, judged]))
        assert np.isnan(scored.rewards).all()
        assert scored.objects("reward_error") == (SAYS[name],) * 2
        told = [each for each in logs if each["log_level"] == "warning"]
        assert [each["error"] for each in told] == [SAYS[name]], name
        assert "test_small_errors.py, line " in told[0]["at"]
        sample = msgspec.json.decode((run.folder / "samples.jsonl").read_bytes().splitlines()[0])
        assert sample["reward_error"] == SAYS[name]


class Raises(Actor):
    @endpoint
    async def work(self) -> None:
        raise Silent

    @endpoint
    async def cancel(self) -> None:
        raise asyncio.CancelledError("of its own")


async def test_what_an_endpoint_raises_is_told_by_its_rank() -> None:
    engine = LocalEngine()
    actor = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Raises)
    with pytest.raises(RankFailed, match=r"Raises\.work on rank 0 .*Silent"):
        await actor.work()
    with pytest.raises(RankFailed, match=r"Raises\.cancel on rank 0 .*CancelledError: of its own"):
        await actor.cancel()
    await engine.close()


async def test_a_script_whose_error_has_no_text_leaves_a_summary(tmp_path: Path) -> None:
    with pytest.raises(Silent):
        async with Run(RunConfig(folder=str(tmp_path))):
            raise Silent
    summary = msgspec.json.decode((tmp_path / "run/summary.json").read_bytes())
    assert (summary["status"], summary["error"]) == ("failed", SAYS["silent"])


FULL = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from meshrl import Metrics, Run, RunConfig

async def main():
    async with Run(RunConfig(folder=sys.argv[1])) as run:
        async for step in run.steps(3):
            if step == 1:
                with suppress(OSError), Path(sys.argv[1], "other").open("wb", buffering=0) as other:
                    while other.write(b"x" * 1000):
                        pass
            await run.record(Metrics.of(loss=(1.0, 1.0)), **{f"number_{n}": 1.0 for n in range(1000)})

asyncio.run(main())
"""
MOUNTS = 'mount -t tmpfs -o size=1m none "$1" && "$2" -c "$3" "$1" > /dev/null; cat "$1/run/summary.json"'


def test_a_disk_that_is_full_at_the_end_has_the_summary(tmp_path: Path) -> None:
    alone = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*alone, "sh", "-c", MOUNTS, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No space left on device" in done.stderr
    summary = msgspec.json.decode(done.stdout)
    assert (summary["status"], summary["steps"]) == ("failed", 1)


def test_the_folder_of_a_fake_run_is_nobody_elses() -> None:
    one, other = FakeRun(), FakeRun()
    folder = one.folder
    assert folder == one.folder != other.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.iterdir())
    del one
    gc.collect()
    assert not folder.exists()


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


def test_a_parquet_file_that_is_damaged_anywhere_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    questions = [f"prompt {number}" for number in range(3000)]
    parquet.write_table(pa.table({"question": questions, "answer": ["b"] * 3000}), path)
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


POLICY = {"backend": "torch", "model": {"characters": "ab"}}
STANDIN = """#!/bin/sh
head -n 1 > "$0.key"
printf '%s ' "$@" > "$0.options"
echo "it was run with $VLLM_SERVER_DEV_MODE"
exit 3
"""


def interpreter(path: Path) -> Path:
    path.write_text(STANDIN)
    path.chmod(0o700)
    return path


@pytest.fixture
def served_run(tmp_path: Path) -> Path:
    program = interpreter(tmp_path / "program")
    folder = tmp_path / "mine"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    table = {"policy": POLICY, "sampler": {"backend": "vllm", "vllm": {"python": str(program), "kv_cache_mib": 7}}}
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    return folder


async def served(served_run: Path, **given: object) -> str:
    with pytest.raises(ModelError) as raised:
        await serve(served_run, ServerAddress.model_validate({"port": 18_471, **given}), lambda _: None)
    return str(raised.value)


async def test_an_interpreter_that_a_folder_names_is_not_run(served_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, own = served_run.with_name("program"), interpreter(served_run.with_name("own"))
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setattr("meshrl_inference.options.find_spec", lambda _: True)  # it has vLLM
    said = await served(served_run)
    assert "it was run with" in said
    assert f"config.toml names the interpreter {program}, which is not run without --python {program}" in said
    assert not program.with_name("program.options").exists()
    options = own.with_name("own.options").read_text()
    assert "--kv-cache-memory-bytes 7340032" in options  # the rest of the table holds
    assert "--middleware" not in options


async def test_an_interpreter_that_the_user_names_is_run_and_told_a_key(served_run: Path) -> None:
    program, keys = served_run.with_name("program"), list[str]()
    for _ in range(2):
        said = await served(served_run, python=str(program), follow=True)
        assert "it was run with 1" in said
        assert "names the interpreter" not in said
        keys.append(program.with_name("program.key").read_text().strip())
        options = program.with_name("program.options").read_text()
        assert "--middleware meshrl_vllm.guard.Guard" in options
        assert keys[-1] not in options
    assert len(set(keys)) == 2
    assert min(map(len, keys)) > 40


async def asked(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> object:
    sent: list[guard.Message] = []

    async def app(scope: guard.Message, receive: guard.Receive, send: guard.Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> guard.Message:
        return {}

    async def send(message: guard.Message) -> None:
        sent.append(message)

    await guard.Guard(app)({"type": kind, "path": path, "headers": headers}, receive, send)
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize("keys", [[], ["a secret"]], ids=["without", "with"])
async def test_who_has_no_key_may_ask_and_change_nothing(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "keys", keys)
    name = guard.HEADER.encode()
    for path in ("/v1/completions", "/v1/models", "/health", "/metrics"):
        assert await asked(path) == 200
    for path in ("/pause", "/collective_rpc", "/update_weights", "/v1", "/", "//health", "/health/", "/V1/models"):
        for headers in ([], [(name, b"")], [(name, b"another")], [(b"authorization", b"Bearer a secret")]):
            assert await asked(path, *headers) == 401
        assert await asked(path, kind="websocket") == 1008
        assert await asked(path, (name, b"a secret")) == (200 if keys else 401)
    assert await asked("", kind="lifespan") == 200
