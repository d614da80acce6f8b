"""`check` reads whole rows before a run, errors name the row in its source, and prompts keep all their messages."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from meshrl import Task, from_trl
from meshrl.errors import DataError
from meshrl.roles import PolicyConfig, SamplerConfig, Sampling
from meshrl.run import examine, load_job
from meshrl.run.check import Findings
from meshrl.tasks import RewardConfig
from meshrl.tasks.function import FunctionReward
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.real_rows.tiny_tokenizers import made, save

SYSTEM, USER = {"role": "system", "content": "yes"}, {"role": "user", "content": "what is 1"}
ASSISTANT = {"role": "assistant", "content": "no"}
ROW: dict[str, object] = {
    "q": "what is 1", "good": "1 + 2", "bad": "3", "label": True, "margin": 0.5, "steps": ["1", " + 2"],
    "labels": [True, False],
}  # fmt: skip
LONG = "hello world " * 200
KEYS = {
    "dpo": ["rejected={bad}"],
    "kto": ["label=label"],
    "reward_model": ["rejected={bad}", "margin=margin"],
    "process_reward": ["completion=steps", "labels=labels"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model"), made())


def examined(folder: Path, model: str, rows: Sequence[Mapping[str, object]], algorithm: str, *more: str) -> Findings:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (folder / "mine.toml").write_text(f'algorithm = "{algorithm}"', "utf-8")
    role = "reward" if "reward" in algorithm else "policy"
    task = [f"source={folder}/rows.jsonl", "prompt={q}", "answer={good}", "held_out=0"]
    keys = [f"{role}.model={model}", *(f"task.{each}" for each in task), *KEYS.get(algorithm, ()), *more]
    keys += ["sampling.max_tokens=4"] if role == "policy" else []
    return examine(load_job(folder / "mine.toml", keys).config, memory=False)


def mistakes(*given: Any) -> str:
    return "\n".join(examined(*given).mistakes)


@pytest.mark.parametrize(
    ("algorithm", "change", "said"),
    [
        ("sft", {"good": None}, "line 9 has no answer to learn"),
        ("sft", {"good": LONG}, r"line 9 has \d+ tokens and the model takes at most 128"),
        ("spin", {"good": LONG}, r"line 9 has \d+ tokens"),
        ("dpo", {"bad": LONG}, r"line 9 has \d+ tokens"),
        ("dpo", {"bad": None}, "line 9: rejected: the row has null in 'bad'"),
        ("dpo", {"bad": ["3"]}, "line 9: rejected: the template '{bad}' does not fit the row"),
        ("kto", {"label": "true"}, "line 9 has label = 'true'"),
        ("kto", {"label": None}, "line 9 has label = None"),
        ("reward_model", {"margin": "0.5"}, "line 9 has margin = '0.5'"),
        ("reward_model", {"margin": -1}, "line 9 has margin = -1"),
        ("reward_model", {"good": LONG}, r"line 9 cannot be judged: the row has \d+ tokens"),
        ("process_reward", {"labels": [True]}, "line 9 has 2 steps and labels"),
        ("process_reward", {"labels": [True, 2]}, "line 9 has the label 2"),
        ("process_reward", {"steps": ["1", ""]}, "line 9 has the steps .* each needs a token"),
        ("process_reward", {"steps": []}, "line 9 has steps = "),
    ],
)
def test_check_reads_what_a_row_teaches(
    tmp_path: Path, model: str, algorithm: str, change: Mapping[str, object], said: str
) -> None:
    rows = [{**ROW, "q": f"what is {number}"} for number in range(12)]
    rows[8].update(change)
    assert re.search(rf"^task: .*rows\.jsonl, {said}", found := mistakes(tmp_path, model, rows, algorithm)), found


@pytest.mark.parametrize("algorithm", ["sft", "spin", *KEYS])
def test_rows_that_fit_have_no_mistake(tmp_path: Path, model: str, algorithm: str) -> None:
    assert mistakes(tmp_path, model, [ROW] * 3, algorithm) == ""
    left_out = [ROW, {**ROW, "q": LONG}]
    assert "line 2" in mistakes(tmp_path, model, left_out, algorithm)
    assert mistakes(tmp_path, model, left_out, algorithm, "task.max_prompt_tokens=20") == ""


@pytest.mark.parametrize(("algorithm", "equal"), [("dpo", 2), ("reward_model", 1), ("dpo", 0), ("kto", 3), ("sft", 3)])
def test_pairs_of_equal_texts_are_counted(tmp_path: Path, model: str, algorithm: str, equal: int) -> None:
    rows = [*[ROW] * 3, *[{**ROW, "bad": ROW["good"]}] * equal]
    found = [each for each in examined(tmp_path, model, rows, algorithm).doubts if "equal texts" in each]
    assert len(found) == (equal > 0 and algorithm in {"dpo", "reward_model"})
    assert not found or re.search(rf"{equal} of {3 + equal} pairs have .*: the first is that of .*, line 4", found[0])


@pytest.mark.parametrize("change", [{"q": "what <tool>"}, {"good": "no <tool>"}])
def test_tokens_beyond_the_embeddings_are_named(tmp_path: Path, change: Mapping[str, object]) -> None:
    tokenizer = made()
    tokenizer.add_tokens(["<tool>"])
    short = save(tmp_path, tokenizer, vocabulary=len(tokenizer) - 1)
    found = mistakes(tmp_path, short, [ROW, {**ROW, **change}], "sft")
    assert re.search(r"rows\.jsonl, line 2 has the token \d+ \(<tool>\) and the model knows 0 to", found), found


def task(*messages: object, prompt: str = "{q}") -> Task:
    return Task.of([{"q": [*messages], "answer": "no"}], prompt=prompt)


@pytest.mark.parametrize("turns", [[SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER]])
async def test_all_messages_of_a_prompt_are_rendered(model: str, turns: list[dict[str, str]]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    batch = task(*turns).train
    sampler, policy = (
        TorchSampler(SamplerConfig(model=model, chat=True)),
        TorchPolicy(PolicyConfig(model=model, chat=True)),
    )
    before = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    (drawn,) = [rows async for rows in sampler.generate(batch.repeat(2), Sampling(max_tokens=2))]
    assert [row[: len(before)].tolist() for row in drawn.tokens] == [before] * 2

    row = await policy.encode(batch.assign(completion=["no"]))
    whole = tokenizer.apply_chat_template([*turns, ASSISTANT], return_dict=False)
    assert row.tokens[0].tolist() == whole[: len(row.tokens[0])]
    assert tokenizer.decode(row.tokens[0][row.loss_mask[0].astype(bool)]) == "no<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER, ASSISTANT], "prompt: `q`.*ends with an assistant's message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has the part"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}, USER], "prompt: `q`.*message 1 is"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_refused(messages: list[object], said: str) -> None:
    with pytest.raises(DataError, match=rf"rows, row 0: .*{said}"):
        task(*messages)


def test_messages_are_no_text(tmp_path: Path, model: str) -> None:
    with pytest.raises(DataError, match=r"`q` has messages.*write {q} alone"):
        task(SYSTEM, USER, prompt="Q: {q}")
    rows = [{**ROW, "q": [SYSTEM, USER]}]
    assert re.search(r"rows\.jsonl, line 1: the prompt is a list", mistakes(tmp_path, model, rows, "sft"))
    assert mistakes(tmp_path, model, rows, "sft", "policy.chat=true") == ""
    for prompt, leaves_out in (("{q[1][content]}", True), ("{q[0][content]} {q[1][content]}", False), ("{q}", False)):
        found = examined(tmp_path, model, rows, "sft", "policy.chat=true", f"task.prompt={prompt}").doubts
        assert any("leaves out the system's message, 'yes', of `q`" in each for each in found) == leaves_out, prompt
    for system in (
        {"role": "system"},
        {**SYSTEM, "content": None},
        {**SYSTEM, "content": [{"type": "text", "text": "yes"}]},
    ):
        rows = [{**ROW, "q": [system, USER]}]
        found = examined(tmp_path, model, rows, "sft", "task.prompt={q[1][content]}").doubts
        assert not any("leaves out" in each for each in found), system


async def test_a_trl_reward_gets_all_messages() -> None:
    def judge(prompts: list[object], completions: list[object]) -> list[float]:
        return [float(prompts == [[SYSTEM, USER]] and completions == [[ASSISTANT]])]

    batch = task(SYSTEM, USER).train.assign(completion=["no"])
    for function in (from_trl(judge, chat=True), from_trl(judge)):
        assert (await FunctionReward(RewardConfig(function=function)).score(batch)).rewards.tolist() == [1.0]
