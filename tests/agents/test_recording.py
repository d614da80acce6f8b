"""`meshrl record`: what agents say to a served model, as rows that are trained on later."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import transformers

from meshrl import ConfigError, CrossEntropy, DataError, NewModel, Policy, PolicyConfig, Sampling, Task, TaskConfig, cli
from meshrl.agents import Gateway, Message, Recording, record, recorded
from meshrl.roles import implementation
from meshrl.testing import ScriptedChat, ScriptedSampler, delayed, simulate
from meshrl_hf.loading import new_config
from meshrl_hf.text import character_tokenizer

MODEL = NewModel(characters="abcdefgh> ", hidden_size=16, ffn_size=32, layers=1, heads=2, max_tokens=64)
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else ' ' }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that converses."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(new_config(MODEL, tokenizer)).save_pretrained(folder)
    return folder


@contextmanager
def recording(*arguments: object) -> Generator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The command, and a client that it serves."""
    code = "import signal; signal.signal(2, signal.default_int_handler); from meshrl.cli import main; main()"
    command = [sys.executable, "-c", code, "record", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(cli.__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(2)]
            url, key = [re.sub("export OPENAI_[A-Z_]*=", "", line).strip() for line in told]
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                yield process, client
        finally:
            process.kill()


def converse(client: openai.OpenAI, *words: str) -> list[Any]:
    messages: list[Any] = []
    for word in words:
        messages.append({"role": "user", "content": word})
        told = client.chat.completions.create(model="any", messages=messages, max_tokens=5)
        messages.append({"role": "assistant", "content": told.choices[0].message.content})
    return messages


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that load torch
def test_what_is_recorded_of_a_model_is_learnt_by_sft(model: Path, tmp_path: Path) -> None:
    file, said = tmp_path / "rows.jsonl", []
    for _ in range(2):  # the second goes on with the file
        with recording(model, "sampling.temperature=0.5", "--out", tmp_path) as (process, client):
            said += [converse(client, "abc", "de", "f"), converse(client, "h")]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, f"2 rows were added to {file}\n")
    rows = rows_of(tmp_path)
    assert [row["messages"] for row in rows] == said
    assert len({row["id"] for row in rows}) == 4
    assert [row["prompt"] for row in rows[:2]] == [
        "".join(f"{each['content']}{end}" for each, end in zip(said[0][:-1], "> > >", strict=True)),
        "h>",
    ]

    task = Task.load(TaskConfig(source=str(tmp_path / "rows.jsonl"), prompt="{id}", answer="{completion}", held_out=0))

    async def learn() -> None:
        policy = implementation(Policy, "torch")(PolicyConfig(model=str(model)))
        batch = recorded(next(task.batches(4, seed=0)))
        learnt = np.asarray(batch.loss_mask.values, np.bool_)
        told = (await policy.logprobs(batch)).ragged("logprobs").values
        assert told[learnt] == pytest.approx(batch.sampler_logprobs.values[learnt], abs=1e-4)
        loss = (await policy.update(batch, CrossEntropy())).means()["loss"]
        assert loss == pytest.approx(-told[learnt].mean(), abs=1e-4)

    asyncio.run(learn())


def said_in_a_script(
    folder: Path,
    program: Callable[[openai.AsyncOpenAI], Awaitable[None]],
    sampler: type[ScriptedSampler] = ScriptedSampler,
) -> list[dict[str, Any]]:
    """What is recorded of a program, in virtual time, with conversations that are over after 100 seconds."""

    async def main() -> None:
        gateway = Gateway(sampler(lambda prompt: f"{len(prompt)}"), ScriptedChat())
        told: list[str] = []
        with Recording(folder / "rows.jsonl", ScriptedChat()) as rows:
            task = asyncio.create_task(record(gateway, Sampling(max_tokens=9), rows, 100.0, told.append))
            await asyncio.sleep(0)
            url, key = (line.partition("=")[2] for line in told[0].splitlines())
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
            async with openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, max_retries=0) as client:
                await program(client)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    simulate(main)
    return rows_of(folder)


async def ask(client: openai.AsyncOpenAI, *messages: str) -> str:
    """Messages of the user's and the assistant's by turns."""
    given: Any = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    return str((await client.chat.completions.create(model="", messages=given)).choices[0].message.content)


def test_a_conversation_that_rests_is_over(tmp_path: Path) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, "a")
        for text in ("b", "c"):
            await asyncio.sleep(90)
            await ask(client, "a", first, text)  # from the first answer on: branches
        assert not (tmp_path / "rows.jsonl").exists()
        await asyncio.sleep(150)
        assert [len(row["messages"]) for row in rows_of(tmp_path)] == [4, 4]
        await ask(client, "a", first, "d")

    rows = said_in_a_script(tmp_path, program)
    assert [row["messages"][-2]["content"] for row in rows] == ["b", "c", "d"]
    # "13" and "44" with their ends, the second alone, and a history that nobody remembers.
    assert [sum(row["loss_mask"]) for row in rows] == [6, 3, 3]
    assert [row["completion"] for row in rows] == ["44", "44", "44"]


async def test_programs_have_sessions_of_their_own(tmp_path: Path) -> None:
    gateway, told = Gateway(ScriptedSampler(["1", "2"]), ScriptedChat()), list[str]()
    with Recording(tmp_path / "rows.jsonl", ScriptedChat()) as rows:
        recording = asyncio.create_task(record(gateway, Sampling(max_tokens=9), rows, 100.0, told.append, sessions=2))
        await asyncio.sleep(0)
        for each in told:
            url, key = (line.partition("=")[2] for line in each.splitlines())
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
            async with openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http) as client:
                await ask(client, "a")
        recording.cancel()
        await asyncio.wait([recording])
    assert [row["completion"] for row in rows_of(tmp_path)] == ["1", "2"]
    assert [f"/s/{row['session']}/" in each for row, each in zip(rows_of(tmp_path), told, strict=True)] == [True, True]


def test_texts_and_tools_are_recorded(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def program(client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="", prompt="1, 2,")
        user: Any = {"role": "user", "content": "hi"}
        await client.chat.completions.create(model="", messages=[user], tools=[tool])

    text, chat = said_in_a_script(tmp_path, program)
    assert (text["prompt"], text["completion"], text["messages"]) == ("1, 2,", "5", [])
    assert chat["tools"] == [tool]
    assert chat["prompt"] == ScriptedChat().render([Message("user", "hi")], [tool])


def test_a_conversation_whose_answer_is_waited_for_does_not_rest(tmp_path: Path) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, "a")
        second = await ask(client, "a", first, "b")
        await ask(client, "a", first, "b", second, "c")
        assert not (tmp_path / "rows.jsonl").exists()

    (row,) = said_in_a_script(tmp_path, program, delayed(ScriptedSampler, generate=300.0))
    assert len(row["messages"]) == 6


def test_a_disk_that_is_full_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def program(client: openai.AsyncOpenAI) -> None:
        await ask(client, "a")
        await asyncio.sleep(150)
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", _full)
            await ask(client, "b")
            await asyncio.sleep(150)
            assert len(rows_of(tmp_path)) == 1
        await ask(client, "c")
        await asyncio.sleep(50)
        assert len(rows_of(tmp_path)) == 2
        monkeypatch.setattr(os, "fsync", _full)

    with pytest.raises(OSError, match="full"):
        said_in_a_script(tmp_path, program)
    assert capsys.readouterr().err.count("rows wait until it can") == 1
    assert [row["messages"][0]["content"] for row in rows_of(tmp_path)] == ["a", "b"]


def test_a_line_without_an_end_is_cut_off(tmp_path: Path) -> None:
    for before, after in ((b"{}\n{}\n{1", b"{}\n{}\n"), (b"{1" * (1 << 20), b""), (b"{}\n", b"{}\n")):
        (tmp_path / "rows.jsonl").write_bytes(before)
        with Recording(tmp_path / "rows.jsonl", ScriptedChat()):
            assert (tmp_path / "rows.jsonl").read_bytes() == after


def _full(_: int) -> None:
    raise OSError("full")


def test_one_process_records_in_a_folder(tmp_path: Path) -> None:
    other = Recording(tmp_path / "rows.jsonl", ScriptedChat())
    with (
        Recording(tmp_path / "rows.jsonl", ScriptedChat()),
        pytest.raises(ConfigError, match="another process records there"),
        other,
    ):
        pass
    with other:
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grpo/quikstart",), "did you mean grpo/quickstart?"),
        (("no/such-model",), "no/such-model"),
        (("sft/quickstart", "sampler.slots=none"), "command line: sampler.slots = 'none'"),
        (("folder",), "folder: no such file or shipped configuration"),
    ],
)
def test_what_cannot_be_served(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["record", *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_rows_of_others_are_told_apart() -> None:
    task = Task.of([{"question": "a", "answer": "b", "tokens": [1, 2]}])
    with pytest.raises(DataError, match="row 0 has no 'loss_mask'"):
        recorded(task.train)
