"""`meshrl check` says before a model loads what a run would say after."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.run import RunConfig, examine, find_doubts, load_job

MINE = """
algorithm = "grpo"
[task]
source = "task.jsonl"
held_out = 0
[policy]
model = "model"
[reward]
function = "mine.py:judge"
[sampling]
max_tokens = 8
"""
GOOD = "def judge(prompt, completion, row):\n    return 1.0\n"


@pytest.fixture
def mine(tmp_path: Path, chat_model: Callable[..., Path]) -> Path:
    """A configuration in which nothing is wrong."""
    (tmp_path / "mine.toml").write_text(MINE, "utf-8")
    (tmp_path / "mine.py").write_text(GOOD, "utf-8")
    (tmp_path / "task.jsonl").write_text('{"question": "2 + 2", "answer": "4"}\n', "utf-8")
    model = chat_model(tmp_path / "model", longest=64)
    (model / "chat_template.jinja").unlink()
    return tmp_path / "mine.toml"


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `meshrl check` finds wrong."""
    with pytest.raises(SystemExit) as ended:
        main(["check", *map(str, arguments)])
    output = capsys.readouterr()
    return " ".join(output.err.split()) if ended.value.code else ""


def test_what_follows_from_a_missing_table_is_not_told(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = mine.read_text("utf-8")
    mine.write_text(whole.replace('[policy]\nmodel = "model"\n', ""), "utf-8")
    assert told(capsys, mine) == f"error: {mine}: policy: is missing"
    mine.write_text(whole.replace('model = "model"\n', ""), "utf-8")
    assert told(capsys, mine) == f"error: {mine}: policy.model: is missing"


def test_nothing_is_wrong(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not told(capsys, mine)


def test_a_typo_in_a_meshs_name_shows_both_places(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "command line: run.meshes.rollout: no role has `mesh = 'rollout'`; sampler.mesh = 'rolout': write the same "
        "name in both"
    ) in told(capsys, mine, "sampler.mesh=rolout", "run.meshes.rollout.cpus=1")


def test_rollouts_ahead_on_the_trainers_mesh_are_doubted(mine: Path) -> None:
    def doubts(*overrides: str) -> list[str]:
        return find_doubts(load_job(mine, overrides, RunConfig).config)

    (doubt,) = doubts("ahead=1")
    assert doubt.startswith("ahead = 1: policy and sampler share the mesh 'main', so rollout and training take turns")
    assert doubts() == doubts("ahead=1", "sampler.mesh=rollout") == []
    assert doubts("ahead=1", "sampler.backend=http", 'sampler.http.urls=["http://localhost:1"]') == []


def test_batches_with_more_prompts_than_there_are_rows_are_doubted(mine: Path) -> None:
    (mine.parent / "task.jsonl").write_text(
        "".join(f'{{"question": "{n}", "answer": "1"}}\n' for n in range(20)), "utf-8"
    )

    def doubts(*overrides: str) -> list[str]:
        return list(examine(load_job(mine, overrides, RunConfig).config).doubts)

    (doubt,) = doubts("prompts=21")
    assert "task.jsonl has 20 training prompts, so a batch has some of them more than once" in doubt
    assert doubts("prompts=20") == doubts("prompts=20", "task.held_out=0") == []


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        (
            "policy.chat=true",
            "command line: policy, sampler, reference: chat = true, but {folder}/model has no chat template",
        ),
        (
            "sampling.max_tokens=64",
            "command line: sampler: sampling.max_tokens = 64: the model takes at most 64 tokens",
        ),
        (
            "swap=drain",
            "command line: swap: no such key; swap is an argument of `rl.rollouts` in the script",
        ),
        ("run.meshes.main.custom={highmem=1}", "run: meshes.main asks for GPUs or custom resources"),
        (
            "policy.weight_sync=broadcast",
            'command line: policy.weight_sync: "broadcast" sends weights between processes',
        ),
        ("policy.model=runs/quickstart-sft/model", "`meshrl run sft/quickstart` writes it"),
    ],
)
def test_what_the_model_and_the_engine_have_not(
    mine: Path, override: str, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mistake.format(folder=mine.parent) in told(capsys, mine, override)


def test_fp8_is_sent_only_to_samplers_that_compute_in_it(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["policy.weight_sync=broadcast", "policy.weight_sync_dtype=fp8", "run.engine=processes"]
    assert 'weight_sync_dtype = "fp8" is for broadcasts' in told(capsys, mine, asked[1])
    assert (
        'policy.weight_sync_dtype: "fp8" sends matrices in FP8, but the sampler has them in float32: set '
        'quantization = "fp8" in the table of a backend that has it'
    ) in told(capsys, mine, *asked)
    fitting = told(capsys, mine, *asked, "sampler.backend=vllm", "sampler.vllm.quantization=fp8")
    assert "weight_sync_dtype" not in fitting


def test_a_template_may_be_a_file_of_its_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine.parent / "model" / "chat_template.jinja").write_text("{}", "utf-8")
    assert not told(capsys, mine, "policy.chat=true")


def test_an_agent(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine.parent / "mine.py").write_text("async def solve(client):\n    return 1.0\n", "utf-8")
    reward = '[reward]\nfunction = "mine.py:judge"\n'
    agent = 'algorithm = "agent"\nagent = { source = "mine.py:solve" }\n'
    text = mine.read_text("utf-8").replace('algorithm = "grpo"\n', agent).replace(reward, "")
    mine.write_text(text, "utf-8")
    found = told(capsys, mine)
    assert f"sampler: agents need a chat template, and {mine.parent}/model has none" in found
    assert "is called with a client and a row, and does not fit: too many positional arguments" in found
    (mine.parent / "model" / "chat_template.jinja").write_text("{}", "utf-8")
    (mine.parent / "mine.py").write_text("async def solve(client, row):\n    return 1.0\n", "utf-8")
    assert not told(capsys, mine)
    assert "there is no program 'nodejs-99' here" in told(capsys, mine, "agent={command=['nodejs-99','a.js']}")


def test_a_reward_that_raises_on_the_tasks_row(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine.parent / "mine.py").write_text("def judge(prompt, completion, row):\n    return row['solution']\n", "utf-8")
    found = told(capsys, mine)
    assert "reward.function: it raised on the task's first row, with its answer '4' as the completion" in found
    assert f"KeyError: 'solution' ({mine.parent}/mine.py, line 2)" in found


@pytest.mark.parametrize(
    "code",
    [
        "def judge(prompt, completion, row):\n    return 1 / len(completion)\n",
        "import asyncio\nasync def judge(prompt, completion, row):\n    await asyncio.sleep(0)\n    return 1\n",
    ],
    ids=["one that raises on an empty text alone", "one that is async"],
)
def test_a_reward_that_judges_some(mine: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    (mine.parent / "mine.py").write_text(code, "utf-8")
    assert not told(capsys, mine)


def test_a_reward_that_does_not_answer_is_told(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshrl.run.check._PATIENCE", 0.05)
    code = "import time\ndef judge(prompt, completion, row):\n    time.sleep(1)\n    return 1.0\n"
    (mine.parent / "mine.py").write_text(code, "utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["check", str(mine)])
    assert not ended.value.code
    found = "".join(capsys.readouterr())
    told = "reward.function did not answer within 0.05 s for the task's first row, so it was not checked"
    assert told in " ".join(found.split())


def test_a_model_that_one_role_reads_is_told_though_the_policy_is_a_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fakes = [f"{role}.backend=fake" for role in ("policy", "sampler", "reward")]
    with pytest.raises(SystemExit):
        main(["check", "online_dpo/quickstart", *fakes])
    assert "reference: model" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leaving:
        main(["check", "online_dpo/quickstart", *fakes, "reference.backend=fake"])
    assert not leaving.value.code
