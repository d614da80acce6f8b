import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTJConfig

from meshrl.run import examine, load_job
from tests.first_hour.chat_model import save_model
from tests.first_hour.terminal import FAKES, SMALL, done, refused, type_in

POLICY = '[policy]\nmodel = "model"\n'
REWARD = '[reward]\nfunction = "mine.py:judge"\n'
MINE = f"""algorithm = "grpo"
prompts = 2
steps = 2
run.name = "mine"
task = {{ source = "task.jsonl", held_out = 0 }}
sampling = {{ max_tokens = 8, n = 2 }}
{POLICY}{REWARD}"""
HEAD = "def judge(prompt, completion, row):\n    "
ROWS: list[dict[str, Any]] = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(8)]
LONG = {"question": "What is " + "1 + " * 20 + "1?", "answer": "21"}
NEW = "{characters = '0123456789 +', max_tokens = 64}"
GOOD = "mine.toml: no mistakes found"
PACKED = f"{GOOD} mine.toml: policy, sampler: rows are packed"
CHAT = "policy.chat=true"


@pytest.fixture(autouse=True)
def mine(tmp_path: Path) -> Path:
    Path("mine.toml").write_text(MINE, "utf-8")
    write_code(f"{HEAD}return float(completion == row['answer'])\n")
    save_model(Path("model"), longest=64)
    write_rows(*ROWS)
    return tmp_path


def write_code(text: str) -> None:
    Path("mine.py").write_text(text, "utf-8")


def write_rows(*rows: object) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path("task.jsonl").write_text("\n".join(lines), "utf-8")


def check(*overrides: str) -> str:
    return re.sub(r"\S+ \[info +\] ", "", type_in("check", "mine.toml", *overrides).told)


def test_what_follows_from_a_missing_table_is_not_told() -> None:
    assert check() == PACKED
    for gone, told in ((POLICY, "policy"), ('model = "model"\n', "policy.model")):
        Path("mine.toml").write_text(MINE.replace(gone, ""), "utf-8")
        assert check() == f"error: mine.toml: {told}: is missing"


def test_what_the_model_and_the_engine_have_not(mine: Path) -> None:
    (template := Path("model/chat_template.jinja")).rename("template")
    fp8 = "policy.weight_sync=broadcast policy.weight_sync_dtype=fp8 run.engine=processes"
    for overrides, told in {
        CHAT: f"policy, sampler, reference: chat = true, but {mine}/model has no chat template",
        "sampling.max_tokens=64": "sampler: sampling.max_tokens = 64: the model takes at most 64 tokens",
        "swap=drain": "command line: swap: no such key; swap is an argument of `rl.rollouts` in the script",
        "run.meshes.main.custom={highmem=1}": "run: meshes.main asks for GPUs or custom resources",
        "policy.weight_sync=broadcast": 'policy.weight_sync: "broadcast" sends weights between processes',
        "policy.weight_sync_dtype=fp8": 'weight_sync_dtype = "fp8" is for broadcasts',
        fp8: '"fp8" sends matrices in FP8, but the sampler has them in float32: set quantization = "fp8" in the table',
        "policy.model=runs/quickstart-sft/model": "`meshrl run sft/quickstart` writes it",
        "sampler.mesh=rolout run.meshes.rollout.cpus=1": "sampler.mesh = 'rolout': write the same name in both",
    }.items():
        assert told in check(*overrides.split())
    assert "weight_sync_dtype" not in check(*fp8.split(), "sampler.backend=vllm", "sampler.vllm.quantization=fp8")
    Path("template").rename(template)
    assert check(CHAT) == PACKED
    for file in Path("model").glob("tokenizer*"):
        file.unlink()
    assert "the folder's tokenizer cannot be loaded (tokenizer.json or" in check()
    described = json.loads(Path("model/config.json").read_bytes())
    Path("model/config.json").write_text(json.dumps(described | {"model_type": "qwen2"}), "utf-8")
    assert "belong next to config.json): ValueError: the folder has no tokenizer" in check()


def test_settings_that_are_rarely_meant_are_doubted() -> None:
    write_rows(*({"question": f"{number}", "answer": "1"} for number in range(20)))

    def doubts(*overrides: str) -> list[str]:
        return [*examine(load_job(Path("mine.toml"), overrides).config).doubts]

    (doubt,) = doubts("ahead=1")
    assert doubt.startswith("ahead = 1: policy and sampler share the mesh 'main', so rollout and training take turns")
    assert doubts() == doubts("ahead=1", "sampler.mesh=rollout") == []
    assert doubts("ahead=1", "sampler.backend=http", 'sampler.http.urls=["http://localhost:1"]') == []
    (doubt,) = doubts("prompts=21")
    assert "task.jsonl has 20 training prompts, so a batch has some of them more than once" in doubt
    assert doubts("prompts=20") == []


def test_an_agent(mine: Path) -> None:
    (template := Path("model/chat_template.jinja")).rename("template")
    write_code("async def solve(client):\n    return 1.0\n")
    agent = 'algorithm = "agent"\nagent = { source = "mine.py:solve" }'
    Path("mine.toml").write_text(MINE.replace('algorithm = "grpo"', agent).replace(REWARD, ""), "utf-8")
    told = check()
    assert f"sampler: agents need a chat template, and {mine}/model has none" in told
    assert "is called with a client and a row, and does not fit: too many positional arguments" in told
    Path("template").rename(template)
    write_code("async def solve(client, row):\n    return 1.0\n")
    assert check() == PACKED
    assert "there is no program 'nodejs-99' here" in check("agent={command=['nodejs-99','a.js']}")


def test_a_model_that_one_role_reads_is_told_though_the_policy_is_a_fake() -> None:
    command = ("check", "online_dpo/quickstart", *FAKES, *SMALL)
    assert "reference: model" in refused(*command)
    done(*command, "reference.backend=fake")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_sampler_whose_engine_is_not_installed() -> None:
    missing = "backend 'vllm' needs the package 'vllm', which is not installed: pip install 'meshrl[vllm]'"
    for command in ("check", "run"):
        assert missing in refused(command, "mine.toml", "sampler.backend=vllm")
    done("run", "mine.toml")
    assert missing in refused("serve", "mine")


def test_a_reward_is_tried_on_the_tasks_first_row(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_code(f"{HEAD}return row['solution']\n")
    told = check()
    assert "reward.function: it raised on the task's first row, with its answer '1' as the completion" in told
    assert f"KeyError: 'solution' ({mine}/mine.py, line 2)" in told
    write_code(f"{HEAD}return 1 if completion == row['answer'] else None\n")
    told = check()
    assert "reward.function: it gave the task's first row no reward, with an empty completion" in told
    assert "TypeError: a reward must be a number, not None: give 0.0 for a failure" in told
    assert GOOD in told
    write_code(f"import asyncio\nasync {HEAD}await asyncio.sleep(0)\n    return 1\n")
    assert check() == PACKED
    write_code(f"{HEAD}return float(f'<{{completion}}' == row['answer'])\n")
    told = check()
    assert "reward.function: the task's own answer scores 0: the first row's, '1', as the completion" in told
    assert GOOD in told
    assert "own answer" not in check("reward.function=reasoning_format")
    monkeypatch.setattr("meshrl.run.check._PATIENCE", 0.05)
    write_code(f"import threading\n{HEAD}threading.Event().wait()\n")
    told = check()
    assert "reward.function did not answer within 0.05 s for the task's first row, so it was not checked" in told
    assert GOOD in told


def test_each_line_is_looked_at(mine: Path) -> None:
    for row, told in (
        ({"answer": "2"}, "line 9: prompt: the template '{question}' needs 'question', which the row lacks"),
        ({"question": "1 + 1"}, "which the row lacks; it has 'question': set task.answer to a template over these"),
        (LONG, f"task: {mine}/task.jsonl, line 9: the prompt has 108 tokens: 'What is 1 + 1 + 1"),
    ):
        write_rows(*ROWS, row)
        for command in ("check", "run"):
            assert told in refused(command, "mine.toml", CHAT)
    assert not Path("runs").exists()


def test_many_mistakes_of_a_kind_are_counted_and_many_rows_looked_at_as_far_as_is_cheap() -> None:
    write_rows(*ROWS, "{", *ROWS, "[1]", "", '{"question"', "{", "{")
    for command in ("check", "run"):
        wrong = refused(command, "mine.toml")
        assert wrong.count("not JSON") == 2
        assert "task.jsonl, line 9: not JSON" in wrong
        assert '; line 18: a row must be an object such as {"question": ...}, not a list; line 20: not JSON' in wrong
        assert "; and 2 lines more" in wrong
    write_rows(*ROWS, *({"question": "1"} for _ in range(9)))
    assert "and 6 more rows" in check()
    write_rows(*ROWS * 2500, ROWS[0])
    assert f"{GOOD}; of the task's rows, only the first 20,000 were checked" in check()


def test_long_rows_are_left_out_where_one_asks_for_it() -> None:
    write_rows(*ROWS, LONG)
    wrong = check(CHAT)
    assert "the model takes 64 tokens, which with 8 new ones (sampling.max_tokens) leaves 56" in wrong
    assert "set task.max_prompt_tokens = 56 to leave longer ones out" in wrong
    gone = "1 of 9 prompts are left out"
    assert f"{gone}: they have more than 56 tokens" in done("run", "mine.toml", CHAT, "task.max_prompt_tokens=56").told
    assert Path("runs/mine/model").is_dir()
    assert gone in done("run", "runs/mine/config.toml", "steps=1").told
    assert done("run", "mine.toml", *FAKES, CHAT, "task.max_prompt_tokens=20").told.count(gone) == 1
    few = refused("run", "mine.toml", *FAKES, CHAT, "task.max_prompt_tokens=1")
    assert "each of its 9 prompts has more than task.max_prompt_tokens = 1 tokens" in few
    Path("tiny.gguf").touch()
    few = check("policy.model=tiny.gguf", "task.max_prompt_tokens=20")
    assert "task: task.max_prompt_tokens = 20: there is no tokenizer to count tokens with" in few

    # They are counted by the tokenizer of a reward where there is no policy.
    reward = (f"reward.model={NEW}", "reward.backend=fake", "reward.optimizer.total_steps=1", "rejected='x'")
    task = ("task.source=task.jsonl", "task.prompt={question}", "task.options={}", "task.held_out_fraction=0.5")
    short = ("steps=1", "rows=2", "task.held_out=1", "task.max_prompt_tokens=20")
    assert gone in done("run", "reward_model/quickstart", *reward, *task, *short).told


def test_what_rows_lack_for_a_new_model_and_for_an_evaluation(mine: Path) -> None:
    write_rows(*ROWS, {"question": "9 * 9", "answer": "81"})
    told = f"task: {mine}/task.jsonl, line 9: the text '9 * 9' has '*', which the tokenizer does not know"
    assert told in check(f"policy.model={NEW}")
    write_rows(ROWS[0])
    assert "[evaluation] needs held-out prompts, and these rows have none" in check("evaluation.every=1")
    assert "held_out = 5, but held_out_fraction" in check("evaluation.every=1", "task.held_out=5")


def test_how_rows_are_read_is_known_before_a_model_loads(mine: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 4096, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    GPTJConfig(**sizes, eos_token_id=0).save_pretrained(mine / "model")  # without any value
    told = check()
    assert GOOD in told
    assert "policy, sampler: rows are padded: " in told
    assert "so its rows cannot be packed" in check("policy.packing=packed")
    Path("model/config.json").write_text('{"model_type": "bert", "architectures": ["BertLMHeadModel"]}')
    assert "BertLMHeadModel computes something else for a row next to a longer one" in check()
