"""`meshrl check` says before a model loads what a run would say after: of keys, models, rewards and a task's rows."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from meshrl.run import RunConfig, examine, find_doubts, load_job
from tests.first_hour.chat_model import save_model
from tests.first_hour.terminal import FAKES, SMALL, Terminal

MINE = """
algorithm = "grpo"
prompts = 2
steps = 2
run.name = "mine"
[task]
source = "task.jsonl"
held_out = 0
[policy]
model = "model"
[reward]
function = "mine.py:judge"
[sampling]
max_tokens = 8
n = 2
"""
JUDGE = "def judge(prompt, completion, row):\n    return float(completion == row['answer'])\n"
ROWS: list[dict[str, Any]] = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(8)]
LONG = {"question": "What is " + "1 + " * 20 + "1?", "answer": "21"}
NEW = "{characters = '0123456789 +', max_tokens = 64}"
GOOD = "mine.toml: no mistakes found"
Check = Callable[..., str]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A project in which nothing is wrong."""
    (tmp_path / "mine.toml").write_text(MINE, "utf-8")
    (tmp_path / "mine.py").write_text(JUDGE, "utf-8")
    save_model(tmp_path / "model", longest=64)
    write(tmp_path, *ROWS)
    return tmp_path


@pytest.fixture
def check(mine: Path, terminal: Terminal) -> Check:
    """What `meshrl check` says of it, of which these lines are otherwise."""
    return lambda *overrides: terminal("check", "mine.toml", *overrides).told


def write(folder: Path, *rows: object) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "task.jsonl").write_text("\n".join(lines), "utf-8")


# --- keys and models ---------------------------------------------------------------------------------


def test_what_follows_from_a_missing_table_is_not_told(mine: Path, check: Check) -> None:
    assert check() == GOOD
    file = mine / "mine.toml"
    for gone, told in (('[policy]\nmodel = "model"\n', "policy"), ('model = "model"\n', "policy.model")):
        file.write_text(MINE.replace(gone, ""), "utf-8")
        assert check() == f"error: mine.toml: {told}: is missing"


def test_what_the_model_and_the_engine_have_not(mine: Path, check: Check) -> None:
    (mine / "model" / "chat_template.jinja").rename(mine / "template")
    for overrides, told in {
        "policy.chat=true": f"policy, sampler, reference: chat = true, but {mine}/model has no chat template",
        "sampling.max_tokens=64": "sampler: sampling.max_tokens = 64: the model takes at most 64 tokens",
        "swap=drain": "command line: swap: no such key; swap is an argument of `rl.rollouts` in the script",
        "run.meshes.main.custom={highmem=1}": "run: meshes.main asks for GPUs or custom resources",
        "policy.weight_sync=broadcast": 'policy.weight_sync: "broadcast" sends weights between processes',
        "policy.model=runs/quickstart-sft/model": "`meshrl run sft/quickstart` writes it",
        "sampler.mesh=rolout run.meshes.rollout.cpus=1": "sampler.mesh = 'rolout': write the same name in both",
    }.items():
        assert told in check(*overrides.split())
    (mine / "template").rename(mine / "model" / "chat_template.jinja")
    assert check("policy.chat=true") == GOOD
    for file in (mine / "model").glob("tokenizer*"):
        file.unlink()
    assert "the folder's tokenizer cannot be loaded (tokenizer.json or" in check()


def test_fp8_is_sent_only_to_samplers_that_compute_in_it(check: Check) -> None:
    asked = ["policy.weight_sync=broadcast", "policy.weight_sync_dtype=fp8", "run.engine=processes"]
    assert 'weight_sync_dtype = "fp8" is for broadcasts' in check(asked[1])
    assert (
        'policy.weight_sync_dtype: "fp8" sends matrices in FP8, but the sampler has them in float32: set '
        'quantization = "fp8" in the table of a backend that has it'
    ) in check(*asked)
    assert "weight_sync_dtype" not in check(*asked, "sampler.backend=vllm", "sampler.vllm.quantization=fp8")


def test_settings_that_are_rarely_meant_are_doubted(mine: Path) -> None:
    write(mine, *({"question": f"{number}", "answer": "1"} for number in range(20)))

    def doubts(*overrides: str) -> list[str]:
        return [*find_doubts(load_job(mine / "mine.toml", overrides, RunConfig).config)]

    (doubt,) = doubts("ahead=1")
    assert doubt.startswith("ahead = 1: policy and sampler share the mesh 'main', so rollout and training take turns")
    assert doubts() == doubts("ahead=1", "sampler.mesh=rollout") == []
    assert doubts("ahead=1", "sampler.backend=http", 'sampler.http.urls=["http://localhost:1"]') == []
    batches = [
        [*examine(load_job(mine / "mine.toml", [f"prompts={prompts}", *more], RunConfig).config).doubts]
        for prompts, more in ((21, []), (20, []), (20, ["task.held_out=0"]))
    ]
    assert "task.jsonl has 20 training prompts, so a batch has some of them more than once" in batches[0][0]
    assert (len(batches[0]), batches[1:]) == (1, [[], []])


def test_an_agent(mine: Path, check: Check) -> None:
    (template := mine / "model" / "chat_template.jinja").rename(mine / "template")
    (mine / "mine.py").write_text("async def solve(client):\n    return 1.0\n", "utf-8")
    agent = 'algorithm = "agent"\nagent = { source = "mine.py:solve" }\n'
    text = MINE.replace('algorithm = "grpo"\n', agent).replace('[reward]\nfunction = "mine.py:judge"\n', "")
    (mine / "mine.toml").write_text(text, "utf-8")
    assert f"sampler: agents need a chat template, and {mine}/model has none" in check()
    assert "is called with a client and a row, and does not fit: too many positional arguments" in check()
    (mine / "template").rename(template)
    (mine / "mine.py").write_text("async def solve(client, row):\n    return 1.0\n", "utf-8")
    assert check() == GOOD
    assert "there is no program 'nodejs-99' here" in check("agent={command=['nodejs-99','a.js']}")


def test_a_model_that_one_role_reads_is_told_though_the_policy_is_a_fake(terminal: Terminal) -> None:
    found = terminal("check", "online_dpo/quickstart", *FAKES, *SMALL)
    assert (found.status, "reference: model" in found.err) == (1, True)
    assert terminal("check", "online_dpo/quickstart", *FAKES, *SMALL, "reference.backend=fake").status == 0


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_sampler_whose_engine_is_not_installed(mine: Path, terminal: Terminal) -> None:
    missing = "backend 'vllm' needs the package 'vllm', which is not installed: pip install 'meshrl[vllm]'"
    for command in ("check", "run"):
        assert missing in terminal(command, "mine.toml", "sampler.backend=vllm").told
    assert terminal("run", "mine.toml").status == 0
    found = terminal("serve", "mine")
    assert (found.status, missing in found.told, "Traceback" in found.told) == (1, True, False)


# --- rewards -----------------------------------------------------------------------------------------


def test_a_reward_is_tried_on_the_tasks_first_row(mine: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "def judge(prompt, completion, row):\n    "
    (mine / "mine.py").write_text(f"{head}return row['solution']\n", "utf-8")
    assert "reward.function: it raised on the task's first row, with its answer '1' as the completion" in check()
    assert f"KeyError: 'solution' ({mine}/mine.py, line 2)" in check()
    for code in (  # one that raises on an empty text alone, and one that is async
        f"{head}return 1 / len(completion)\n",
        f"import asyncio\nasync {head}await asyncio.sleep(0)\n    return 1\n",
    ):
        (mine / "mine.py").write_text(code, "utf-8")
        assert check() == GOOD
    (mine / "mine.py").write_text(JUDGE.replace("completion ==", "f'<{completion}' =="), "utf-8")
    told = check()
    assert "reward.function: the task's own answer scores 0: the first row's, '1', as the completion" in told
    assert GOOD in told
    assert "own answer" not in check("reward.function=reasoning_format")
    monkeypatch.setattr("meshrl.run.check._PATIENCE", 0.05)
    (mine / "mine.py").write_text(f"import threading\n{head}threading.Event().wait()\n", "utf-8")
    told = check()
    assert "reward.function did not answer within 0.05 s for the task's first row, so it was not checked" in told
    assert GOOD in told


# --- rows --------------------------------------------------------------------------------------------


def test_each_line_is_looked_at(mine: Path, terminal: Terminal) -> None:
    for row, told in (
        ('{"question": "1 + 1", "answer":', f"task: {mine}/task.jsonl, line 9: not JSON"),
        ({"answer": "2"}, "line 9: prompt: the template '{question}' needs 'question', which the row lacks"),
        ({"question": "1 + 1"}, "which the row lacks; it has 'question': set task.answer to a template over these"),
        (LONG, f"task: {mine}/task.jsonl, line 9: the prompt has 108 tokens: 'What is 1 + 1 + 1"),
    ):
        write(mine, *ROWS, row)
        for command in ("check", "run"):
            assert told in terminal(command, "mine.toml", "policy.chat=true").told
    assert not (mine / "runs").exists()


def test_columns_that_are_lists(mine: Path, check: Check) -> None:
    write(mine, *({"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS))
    wrong = check("policy.chat=true", "task.prompt={prompt}")
    assert "`prompt` is a list of messages: write {prompt[0][content]}, with policy.chat = true" in wrong
    assert check("policy.chat=true", "task.prompt={prompt[0][content]}") == GOOD
    write(mine, *({"numbers": [number, 1], "answer": str(number + 1)} for number in range(8)))
    assert check("task.prompt=sum {numbers}") == GOOD


def test_many_mistakes_of_a_kind_are_counted_and_many_rows_looked_at_as_far_as_is_cheap(
    mine: Path, terminal: Terminal, check: Check
) -> None:
    write(mine, *ROWS, "{", *ROWS, "[1]", "", '{"question"', "{", "{")
    for command in ("check", "run"):
        wrong = terminal(command, "mine.toml").told
        assert wrong.count("not JSON") == 2
        assert "task.jsonl, line 9: not JSON" in wrong
        assert '; line 18: a row must be an object such as {"question": ...}, not a list; line 20: not JSON' in wrong
        assert "; and 2 lines more" in wrong
    write(mine, *ROWS, *({"question": "1"} for _ in range(9)))
    assert "and 6 more rows" in check()
    write(mine, *ROWS * 2500, ROWS[0])
    assert check().endswith("of the task's rows, only the first 20,000 were checked")


def test_long_rows_are_left_out_where_one_asks_for_it(mine: Path, terminal: Terminal, check: Check) -> None:
    write(mine, *ROWS, LONG)
    chat = "policy.chat=true"
    wrong = check(chat)
    assert "the model takes 64 tokens, which with 8 new ones (sampling.max_tokens) leaves 56" in wrong
    assert "set task.max_prompt_tokens = 56 to leave longer ones out" in wrong
    gone = "1 of 9 prompts are left out"
    found = terminal("run", "mine.toml", chat, "task.max_prompt_tokens=56").told
    assert f"{gone}: they have more than 56 tokens" in found
    assert (mine / "runs/mine/model").is_dir()
    assert gone in terminal("run", "runs/mine/config.toml", "steps=1").told
    assert terminal("run", "mine.toml", *FAKES, chat, "task.max_prompt_tokens=20").told.count(gone) == 1
    few = terminal("run", "mine.toml", *FAKES, chat, "task.max_prompt_tokens=1").told
    assert "each of its 9 prompts has more than task.max_prompt_tokens = 1 tokens" in few
    (mine / "tiny.gguf").touch()
    few = check("policy.model=tiny.gguf", "task.max_prompt_tokens=20")
    assert "task: task.max_prompt_tokens = 20: there is no tokenizer to count tokens with" in few


def test_long_rows_are_counted_by_what_there_is_without_a_policy(mine: Path, terminal: Terminal) -> None:
    new = f"reward.model={NEW}"
    reward = ("reward_model/quickstart", new, "reward.backend=fake", "steps=1", "rows=2", "rejected='x'")
    task = ("task.source=task.jsonl", "task.prompt={question}", "task.options={}", "task.held_out=1")
    write(mine, *ROWS, LONG)
    fewer = (*reward, *task, "task.held_out_fraction=0.5", "reward.optimizer.total_steps=1")
    assert "1 of 9 prompts are left out" in terminal("run", *fewer, "task.max_prompt_tokens=20").told


def test_what_rows_lack_for_a_new_model_and_for_an_evaluation(mine: Path, check: Check) -> None:
    write(mine, *ROWS, {"question": "9 * 9", "answer": "81"})
    told = f"task: {mine}/task.jsonl, line 9: the text '9 * 9' has '*', which the tokenizer does not know"
    assert told in check(f"policy.model={NEW}")
    write(mine, ROWS[0])
    assert "[evaluation] needs held-out prompts, and these rows have none" in check("evaluation.every=1")
    told = check("evaluation.every=1", "task.held_out=5")
    assert "held_out = 5, but held_out_fraction" in told
