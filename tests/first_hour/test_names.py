"""A run is found by its name, beside the folder of one's own that has the same name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Terminal = Callable[..., tuple[int, str, str]]
FAKES = ("policy.backend=fake", "sampler.backend=fake", "steps=5", "prompts=2", "policy.optimizer.total_steps=5")


@pytest.fixture
def mine(terminal: Terminal, tmp_path: Path) -> Path:
    """The folder of a run that `meshrl new` and `meshrl run` made, beside ./mine."""
    assert terminal("new", "grpo", "mine")[0] == 0
    status, _, err = terminal("report", "mine")
    assert status == 1
    assert "mine is not the folder of a run: none of metrics.jsonl" in err
    assert terminal("run", "mine/config.toml", *FAKES)[0] == 0
    return tmp_path / "runs" / "mine"


def test_the_run_is_meant_where_a_project_has_its_name(mine: Path, terminal: Terminal) -> None:
    status, out, _ = terminal("report", "mine")
    assert (status, out.splitlines()[0]) == (0, "wrote runs/mine/report.html")
    for command, file in (("trace", "trace.json"), ("audit", "")):
        assert terminal(command, "mine")[0] == 0
        assert (mine / file).exists()
    status, _, err = terminal("simulate", "mine/config.toml", "--from", "mine", *FAKES)
    assert status == 0, err
    for arguments in (["eval", "mine"], ["serve", "mine"], ["push", "mine", "me/mine"]):
        told = " ".join(terminal(*arguments)[2].split())
        assert f"{mine} has neither a model" in told
        assert "its policy was a fake, which writes no model: run it with a model" in told
    assert f"{mine} has trained no adapters" in terminal("merge", "mine")[2]


def test_a_name_of_two_runs_is_told(mine: Path, terminal: Terminal, tmp_path: Path) -> None:
    shutil.copy(mine / "metrics.jsonl", tmp_path / "mine")
    status, _, err = terminal("report", "mine")
    assert status == 1
    assert "mine may be ./mine or runs/mine, and both are folders of runs: write the path of one" in " ".join(
        err.split()
    )
    assert terminal("report", "./mine")[1] == "wrote mine/report.html\n"
    assert terminal("report", "runs/mine")[1].startswith("wrote runs/mine/report.html\n")
