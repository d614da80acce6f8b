"""What one types nearly right is answered with what is meant."""

import re
from pathlib import Path

from tests.first_hour.terminal import FAKES, SMALL, Terminal


def test_what_is_typed_nearly_right(terminal: Terminal, tmp_path: Path) -> None:
    assert re.fullmatch(r"meshrl \d+\.\d+\.\d+\S*\n", terminal("--version").out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("", "utf-8")
    for typed, told in {
        "run mine": "mine: is a folder, not a configuration; did you mean mine/config.toml?",
        "check sft": "did you mean sft/agent or sft/quickstart or sft/quickstart-megatron or sft/quickstart-vllm?",
        "run dpo": "dpo: is an algorithm, not a configuration; did you mean dpo/quickstart?",
        "new grpo/quickstart z": "no algorithm 'grpo/quickstart' is shipped; did you mean 'grpo'?",
        "new grop .": "error: no algorithm 'grop' is shipped; did you mean 'grpo'?",
        "run zzzzz": "zzzzz: no such file or shipped configuration; the shipped ones are agent/quickstart, ",
        "run grpo/quickstart algorithm=3": 'algorithm is missing: write algorithm = "NAME" (of ',
        "run grpo/quickstart steps 3": "steps 3: a key and its value are one argument. Write steps=3",
    }.items():
        status, _, err = terminal(*typed.split())
        assert (status, told in err, "Traceback" in err) == (1, True, False), err
    assert terminal("rnu", "x").status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_evaluation_is_left_out_by_the_command_line(terminal: Terminal, tmp_path: Path) -> None:
    short = ("grpo/quickstart", *FAKES, *SMALL, "steps=1", "prompts=2")
    assert terminal("run", *short, "evaluation=false").status == 0
    assert not (tmp_path / "runs/quickstart/evaluations.jsonl").exists()
    assert "[evaluation]" not in (tmp_path / "runs/quickstart/config.toml").read_text("utf-8")
    told = terminal("check", *short, "evaluation=true").err
    assert "command line: evaluation = true: must be a table" in told


def test_an_earlier_evaluation_is_kept(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal("run", "grpo/quickstart", *FAKES, *SMALL, "steps=1", "prompts=2", "run.checkpoint_every=1")[0] == 0
    run = tmp_path / "runs" / "quickstart"
    for n, kept in (("2", []), ("2", []), ("1", ["eval-1.json"]), ("3", ["eval-1.json", "eval-2.json"])):
        before = (run / "eval.json").read_bytes() if (run / "eval.json").exists() else b""
        status, out, err = terminal("eval", "quickstart", "--n", n, "--rows", "4")
        assert status == 0, err
        assert sorted(each.name for each in run.glob("eval-*.json")) == kept
        if kept and kept[-1] in out:
            assert (run / kept[-1]).read_bytes() == before
    assert "eval-2.json" in out
    told = "temperature = 0.0: is greedy, but a greedy completion of each prompt is evaluated anyway: leave it out"
    assert told in terminal("eval", "quickstart", "--temperature", "0").err


def test_a_folder_is_no_source_of_rows(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    command = ("check", "grpo/quickstart", *FAKES, "task.source=rows", "task.options={}")
    told = "task source 'rows': is a folder, but rows are read from one file: it has no .jsonl or .parquet file"
    assert told in terminal(*command).err
    (tmp_path / "rows" / "train.jsonl").touch()
    assert "name a file in it, such as rows/train.jsonl" in terminal(*command).err


def test_mistakes_are_told_by_where_they_are_typed_and_equal_ones_once(terminal: Terminal) -> None:
    typed = ("policy.model=nowhere", "reward.function=exactly", "task.prompt={wrd}")
    err = terminal("check", "grpo/quickstart", *SMALL, *typed).err
    assert "3 mistakes" in err
    for key in ("policy: model", "reward: reward function 'exactly'", "task: meshrl:spell_backward, row 0: prompt"):
        assert f"  command line: {key}" in err
    assert "quickstart.toml: policy: model" in terminal("check", "grpo/quickstart", *SMALL).err

    backends = [f"{role}.backend=nope" for role in ("policy", "sampler", "reference")]
    err = terminal("check", "grpo/quickstart", "loss.kl=0.1", *SMALL, *backends).err
    assert "command line: policy, sampler, reference: no backend 'nope' is installed" in err
    assert err.count("no backend 'nope'") == 1
