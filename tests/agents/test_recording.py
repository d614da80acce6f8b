"""`meshrl record`: what agents say to a served model, as rows that are trained on later."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import transformers

from meshrl import CrossEntropy, NewModel, Policy, PolicyConfig, Sampling, Task, TaskConfig, cli
from meshrl.agents import Gateway, Message, Recording, record, recorded
from meshrl.errors import ConfigError, DataError
from meshrl.roles import implementation
from meshrl.testing import ScriptedChat, ScriptedSampler, delayed, simulate
from meshrl_torch.model.loading import new_config
from meshrl_torch.model.text import character_tokenizer
from tests.agents.talks import client_of

MODEL = NewModel(characters="abcdefgh> ", hidden_size=16, ffn_size=32, layers=1, heads=2, max_tokens=64)
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else ' ' }}{% endfor %}"


def recorded_of(program: Callable[[openai.OpenAI], None], *arguments: object) -> None:
    read, write = os.pipe()

    def talk() -> None:
        with os.fdopen(read) as told:
            url, key = (told.readline().strip().partition("=")[2] for _ in range(2))
        if not key:
            return  # the command has failed
        try:
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                program(client)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    talking = threading.Thread(target=talk)
    talking.start()
    status: object = 0
    with os.fdopen(write, "w") as told, redirect_stdout(told):
        try:
            cli.main(["record", *map(str, arguments), "--port", "0"])
        except SystemExit as end:
            status = end.code
    talking.join()
    assert not status, "Ctrl-C is how it ends"


def converse(client: openai.OpenAI, *words: str) -> list[Any]:
    messages: list[Any] = []
    for word in words:
        messages.append({"role": "user", "content": word})
        told = client.chat.completions.create(model="any", messages=messages, max_tokens=5)
        messages.append({"role": "assistant", "content": told.choices[0].message.content})
    return messages


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]


def test_what_a_model_said_is_added_and_learnt_by_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, said = tmp_path / "model", tmp_path / "rows.jsonl", list[list[Any]]()
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    transformers.AutoModelForCausalLM.from_config(new_config(MODEL, tokenizer)).save_pretrained(model)
    file.write_text("{}\n", "utf-8")  # of an earlier recording

    def program(client: openai.OpenAI) -> None:
        said.extend(converse(client, *words) for words in (("abc", "de", "f"), ("h",)))

    recorded_of(program, model, "sampling.temperature=0.5", "--out", tmp_path)
    assert f"2 rows were added to {file}\n" in capsys.readouterr().err
    before, *rows = rows_of(tmp_path)
    assert before == {}
    assert [row["messages"] for row in rows] == said
    assert len({row["id"] for row in rows}) == 2
    turns = [f"{each['content']}{end}" for each, end in zip(said[0][:-1], "> > >", strict=True)]
    assert [row["prompt"] for row in rows] == ["".join(turns), "h>"]

    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task = Task.load(TaskConfig(source=str(file), prompt="{id}", answer="{completion}", held_out=0))
    batch = recorded(next(task.batches(2, seed=0)))
    policy = implementation(Policy, "torch")(PolicyConfig(model=str(model)))
    learnt = np.asarray(batch.loss_mask.values, np.bool_)
    told = asyncio.run(policy.logprobs(batch)).ragged("logprobs").values
    assert told[learnt] == pytest.approx(batch.sampler_logprobs.values[learnt], abs=1e-4)
    loss = asyncio.run(policy.update(batch, CrossEntropy())).means()["loss"]
    assert loss == pytest.approx(-told[learnt].mean(), abs=1e-4)


def said_in_a_script(
    folder: Path,
    program: Callable[[openai.AsyncOpenAI, openai.AsyncOpenAI], Awaitable[None]],
    sampler: type[ScriptedSampler] = ScriptedSampler,
) -> list[dict[str, Any]]:
    """What is recorded of a program of two sessions, in virtual time: conversations are over after 100 seconds."""

    async def main() -> None:
        gateway = Gateway(sampler(lambda prompt: f"{len(prompt)}"), ScriptedChat())
        told: list[str] = []
        with Recording(folder / "rows.jsonl", ScriptedChat()) as rows:
            task = asyncio.create_task(record(gateway, Sampling(max_tokens=9), rows, 100.0, told.append, sessions=2))
            await asyncio.sleep(0)
            urls_and_keys = [[line.partition("=")[2] for line in each.splitlines()[:2]] for each in told]
            one, other = (client_of(gateway, url, key) for url, key in urls_and_keys)
            async with one, other:
                await program(one, other)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    simulate(main)
    return rows_of(folder)


async def ask(client: openai.AsyncOpenAI, *messages: str) -> str:
    given: Any = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    return str((await client.chat.completions.create(model="", messages=given)).choices[0].message.content)


def test_a_conversation_that_rests_is_over(tmp_path: Path) -> None:
    async def program(client: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
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


def test_texts_and_tools_of_two_sessions_are_recorded(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def program(client: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="", prompt="1, 2,")
        user: Any = {"role": "user", "content": "hi"}
        await other.chat.completions.create(model="", messages=[user], tools=[tool])
        assert client.base_url != other.base_url

    text, chat = said_in_a_script(tmp_path, program)
    assert (text["prompt"], text["completion"], text["messages"]) == ("1, 2,", "5", [])
    assert chat["tools"] == [tool]
    assert chat["prompt"] == ScriptedChat().render([Message("user", "hi")], [tool])
    assert text["session"] != chat["session"]


def test_a_conversation_whose_answer_is_waited_for_does_not_rest(tmp_path: Path) -> None:
    async def program(client: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
        await ask(client, "a", await ask(client, "a"), "b")
        assert not (tmp_path / "rows.jsonl").exists()

    (row,) = said_in_a_script(tmp_path, program, delayed(ScriptedSampler, generate=300.0))
    assert len(row["messages"]) == 4


def _full(_: int) -> None:
    raise OSError("full")


def test_a_disk_that_is_full_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def program(client: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
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


def test_a_line_without_an_end_is_cut_off_and_one_process_alone_records_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for before, after in ((b"{}\n{}\n{1", b"{}\n{}\n"), (b"{1" * (1 << 20), b""), (b"{}\n", b"{}\n")):
        file.write_bytes(before)
        with Recording(file, ScriptedChat()):
            assert file.read_bytes() == after

    one, other = (Recording(file, ScriptedChat()) for _ in range(2))
    with one, pytest.raises(ConfigError, match="another process records there"), other:
        pass
    with other:
        pass


def test_what_cannot_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("no/such-model",), "no/such-model"),
        (("sft/quickstart", "sampler.slots=none"), "command line: sampler.slots = 'none'"),
        (("folder",), "folder: no such file or shipped configuration"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["record", *arguments])
        assert ended.value.code == 1
        assert message in capsys.readouterr().err


def test_rows_of_others_are_told_apart() -> None:
    task = Task.of([{"question": "a", "answer": "b", "tokens": [1, 2]}])
    with pytest.raises(DataError, match="row 0 has no 'loss_mask'"):
        recorded(task.train)


def test_feedback_comes_later_than_its_answers(tmp_path: Path) -> None:
    ids = list[str]()

    async def say(client: openai.AsyncOpenAI, **told: Any) -> None:
        await client.post("/feedback", body=told, cast_to=object)

    async def program(client: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
        for text in ("a", "b", "c"):
            told = await client.chat.completions.create(model="", messages=[{"role": "user", "content": text}])
            ids.append(told.id)
        await say(client, id=ids[0], reward=0.25)
        await asyncio.sleep(200)
        rows = rows_of(tmp_path)
        assert [row["answers"] for row in rows] == [[each.removeprefix("chatcmpl-")] for each in ids]
        await say(other, id=ids[0], reward=1)  # its row is written, and somebody has thought again
        await say(other, id=rows[1]["id"], label=False)
        for wrong, message in (
            ({"id": "x"}, "a reward, a label, or both"),
            ({"reward": 1.0}, "missing required field"),
            ({"id": "x", "reward": 1e300}, "<= 1e"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await say(client, **wrong)

    said_in_a_script(tmp_path, program)
    source = TaskConfig(source=str(tmp_path / "rows.jsonl"), prompt="{id}", answer="{completion}", held_out=0)
    task = Task.load(source).train
    batch = recorded(task, tmp_path / "rows.feedback.jsonl")
    assert np.array_equal(batch.rewards, np.array([1.0, np.nan, np.nan], np.float32), equal_nan=True)
    assert batch.objects("label") == (None, False, None)
    with (tmp_path / "rows.feedback.jsonl").open("ab") as being_written:
        being_written.write(b'{"id": "a", "rew')
    assert recorded(task, tmp_path / "rows.feedback.jsonl").objects("label") == (None, False, None)
    (tmp_path / "rows.feedback.jsonl").write_bytes(b'{"id": "a", "reward": "good"}\n')
    with pytest.raises(DataError, match=r"rows.feedback.jsonl, line 1: Expected `float \| null`"):
        recorded(task, tmp_path / "rows.feedback.jsonl")
    assert "rewards" not in recorded(task)


def test_an_id_of_several_answers_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def program(client: openai.AsyncOpenAI, _: openai.AsyncOpenAI) -> None:
        told = await client.chat.completions.create(model="", messages=[{"role": "user", "content": "a"}], n=2)
        await client.post("/feedback", body={"id": told.id, "reward": 1.0}, cast_to=object)

    said_in_a_script(tmp_path, program)
    source = TaskConfig(source=str(tmp_path / "rows.jsonl"), prompt="{id}", answer="{completion}", held_out=0)
    batch = recorded(Task.load(source).train, tmp_path / "rows.feedback.jsonl")
    assert np.isnan(batch.rewards).all()
    assert "1 ids in" in capsys.readouterr().err
