"""What one types nearly right is answered with what is meant."""

import re
import shutil
from pathlib import Path

from tests.first_hour.terminal import FAKES, SMALL, done, refused, type_in

SHORT = ("run", "grpo/quickstart", *FAKES, *SMALL, "steps=1", "prompts=2")


def test_what_is_typed_nearly_right() -> None:
    assert re.fullmatch(r"meshrl \d+\.\d+\.\d+\S*\n", done("--version").out)
    Path("mine").mkdir()
    Path("mine/config.toml").write_text("", "utf-8")
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
        assert told in refused(*typed.split())
    assert type_in("rnu", "x").status == 2
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_evaluation_is_left_out_by_the_command_line() -> None:
    done(*SHORT, "evaluation=false")
    assert not Path("runs/quickstart/evaluations.jsonl").exists()
    assert "[evaluation]" not in Path("runs/quickstart/config.toml").read_text("utf-8")
    assert "command line: evaluation = true: must be a table" in refused(*SHORT, "evaluation=true")


def test_an_earlier_evaluation_is_kept() -> None:
    done(*SHORT, "run.checkpoint_every=1")
    run, before = Path("runs/quickstart"), b""
    for n, kept in (("2", []), ("2", []), ("1", ["eval-1.json"]), ("3", ["eval-1.json", "eval-2.json"])):
        out = done("eval", "quickstart", "--n", n, "--rows", "4").out
        assert sorted(each.name for each in run.glob("eval-*.json")) == kept
        if kept:
            assert kept[-1] in out
            assert (run / kept[-1]).read_bytes() == before
        before = (run / "eval.json").read_bytes()
    told = "temperature = 0.0: is greedy, but a greedy completion of each prompt is evaluated anyway: leave it out"
    assert told in refused("eval", "quickstart", "--temperature", "0")


def test_a_folder_is_no_source_of_rows() -> None:
    Path("rows").mkdir()
    command = ("check", "grpo/quickstart", *FAKES, "task.source=rows", "task.options={}")
    told = "task source 'rows': is a folder, but rows are read from one file: it has no .jsonl or .parquet file"
    assert told in refused(*command)
    Path("rows/train.jsonl").touch()
    assert "name a file in it, such as rows/train.jsonl" in refused(*command)


def test_mistakes_are_told_by_where_they_are_typed_and_equal_ones_once() -> None:
    check = ("check", "grpo/quickstart", *SMALL)
    told = refused(*check, "policy.model=nowhere", "reward.function=exactly", "task.prompt={wrd}")
    assert "3 mistakes" in told
    for key in ("policy: model", "reward: reward function 'exactly'", "task: meshrl:spell_backward, row 0: prompt"):
        assert f" command line: {key}" in told
    assert "quickstart.toml: policy: model" in refused(*check)

    backends = [f"{role}.backend=nope" for role in ("policy", "sampler", "reference")]
    told = refused(*check, "loss.kl=0.1", *backends)
    assert "command line: policy, sampler, reference: no backend 'nope' is installed" in told
    assert told.count("no backend 'nope'") == 1


def test_a_run_is_meant_by_its_name_where_a_project_has_it(tmp_path: Path) -> None:
    fakes = (*FAKES, "steps=5", "prompts=2", "policy.optimizer.total_steps=5")
    done("new", "grpo", "mine")
    assert "mine is not the folder of a run: none of metrics.jsonl" in refused("report", "mine")
    done("run", "mine/config.toml", *fakes)
    mine = tmp_path / "runs" / "mine"
    assert done("report", "mine").out.splitlines()[0] == "wrote runs/mine/report.html"
    done("audit", "mine")
    done("trace", "mine")
    assert (mine / "trace.json").exists()
    done("simulate", "mine/config.toml", "--from", "mine", *fakes)
    for arguments in (["eval", "mine"], ["serve", "mine"], ["push", "mine", "me/mine"]):
        told = refused(*arguments)
        assert f"{mine} has neither a model" in told
        assert "its policy was a fake, which writes no model: run it with a model" in told
    assert f"{mine} has trained no adapters" in refused("merge", "mine")

    shutil.copy(mine / "metrics.jsonl", "mine")
    both = "mine may be ./mine or runs/mine, and both are folders of runs: write the path of one"
    assert both in refused("report", "mine")
    assert done("report", "./mine").out == "wrote mine/report.html\n"
    assert done("report", "runs/mine").out.startswith("wrote runs/mine/report.html\n")
