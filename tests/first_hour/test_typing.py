"""What one types nearly right is answered with what is meant."""

import re
from pathlib import Path

from tests.first_hour.terminal import Terminal

FAKES = ("policy.backend=fake", "sampler.backend=fake", "reward.backend=fake")


def test_what_is_typed_nearly_right(terminal: Terminal, tmp_path: Path) -> None:
    assert re.fullmatch(r"meshrl \d+\.\d+\.\d+\S*\n", terminal("--version").out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("", "utf-8")
    for typed, told in {
        "run mine": "mine: is a folder, not a configuration; did you mean mine/config.toml?",
        "check sft": "did you mean sft/agent or sft/quickstart or sft/quickstart-megatron or sft/quickstart-vllm?",
        "run dpo": "dpo: is an algorithm, not a configuration; did you mean dpo/quickstart?",
        "new grpo/quickstart z": "no algorithm 'grpo/quickstart' is shipped; did you mean 'grpo'?",
        "run grpo/quickstart steps 3": "steps 3: a key and its value are one argument. Write steps=3",
    }.items():
        status, _, err = terminal(*typed.split())
        assert (status, told in err) == (1, True), err


def test_evaluation_is_left_out_by_the_command_line(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'algorithm = "grpo"\nsteps = 1\nprompts = 2\nrun.name = "mine"\n[task]\nsource = "meshrl:spell_backward"\n'
        'prompt = "{word}"\n[policy]\nmodel = "none"\n[reward]\n[evaluation]\nevery = 1\nrows = 4\n',
        "utf-8",
    )
    assert terminal("run", "mine.toml", *FAKES, "evaluation=false")[0] == 0
    assert not (tmp_path / "runs/mine/evaluations.jsonl").exists()
    assert "[evaluation]" not in (tmp_path / "runs/mine/config.toml").read_text("utf-8")
    err = terminal("check", "mine.toml", *FAKES, "evaluation=true")[2]
    assert "command line: evaluation = true: must be a table" in err


def test_an_earlier_evaluation_is_kept(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal("run", "grpo/quickstart", *FAKES, "steps=1", "prompts=2", "run.checkpoint_every=1")[0] == 0
    run = tmp_path / "runs" / "quickstart"
    for n, kept in (("2", []), ("2", []), ("1", ["eval-1.json"]), ("3", ["eval-1.json", "eval-2.json"])):
        before = (run / "eval.json").read_bytes() if (run / "eval.json").exists() else b""
        status, out, err = terminal("eval", "quickstart", "--n", n, "--rows", "4")
        assert status == 0, err
        assert sorted(each.name for each in run.glob("eval-*.json")) == kept
        if kept and kept[-1] in out:
            assert (run / kept[-1]).read_bytes() == before
    assert "eval-2.json" in out
    err = terminal("eval", "quickstart", "--temperature", "0")[2]
    assert (
        "temperature = 0.0: is greedy, but a greedy completion of each prompt is evaluated anyway: leave it out" in err
    )


def test_a_folder_is_no_source_of_rows(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    err = terminal("check", "grpo/quickstart", *FAKES, "task.source=rows", "task.options={}")[2]
    assert "task source 'rows': is a folder, but rows are read from one file: it has no .jsonl or .parquet file" in err
    (tmp_path / "rows" / "train.jsonl").touch()
    err = terminal("check", "grpo/quickstart", *FAKES, "task.source=rows", "task.options={}")[2]
    assert "name a file in it, such as rows/train.jsonl" in err


def test_a_package_that_holds_a_model_is_named_as_pip_knows_it(terminal: Terminal) -> None:
    err = terminal("check", "grpo/quickstart", "policy.model=package:llm_smollm3/model.gguf")[2]
    assert "the package 'llm_smollm3' is not installed: pip install llm-smollm3\n" in err


def test_mistakes_are_told_by_where_they_are_typed_and_equal_ones_once(terminal: Terminal) -> None:
    err = terminal("check", "grpo/quickstart", "policy.model=nowhere", "reward.function=exactly", "task.prompt={wrd}")[
        2
    ]
    assert "3 mistakes" in err
    for key in ("policy: model", "reward: reward function 'exactly'", "task: meshrl:spell_backward, row 0: prompt"):
        assert f"  command line: {key}" in err
    assert "quickstart.toml: policy: model" in terminal("check", "grpo/quickstart")[2]

    backends = [f"{role}.backend=nope" for role in ("policy", "sampler", "reference")]
    err = terminal("check", "grpo/quickstart", "loss.kl=0.1", *backends)[2]
    assert "command line: policy, sampler, reference: no backend 'nope' is installed" in err
    assert err.count("no backend 'nope'") == 1
