"""A run is found by its name, beside the folder of one's own that has the same name."""

import shutil
from pathlib import Path

from tests.first_hour.terminal import Terminal

FAKES = ("policy.backend=fake", "sampler.backend=fake", "steps=5", "prompts=2", "policy.optimizer.total_steps=5")


def test_the_run_is_meant_where_a_project_has_its_name(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal("new", "grpo", "mine").status == 0
    status, _, err = terminal("report", "mine")
    assert (status, "mine is not the folder of a run: none of metrics.jsonl" in err) == (1, True)
    assert terminal("run", "mine/config.toml", *FAKES).status == 0
    mine = tmp_path / "runs" / "mine"
    status, out, _ = terminal("report", "mine")
    assert (status, out.splitlines()[0]) == (0, "wrote runs/mine/report.html")
    for command, file in (("trace", "trace.json"), ("audit", "")):
        assert terminal(command, "mine")[0] == 0
        assert (mine / file).exists()
    status, _, err = terminal("simulate", "mine/config.toml", "--from", "mine", *FAKES)
    assert status == 0, err
    for arguments in (["eval", "mine"], ["serve", "mine"], ["push", "mine", "me/mine"]):
        told = terminal(*arguments).told
        assert f"{mine} has neither a model" in told
        assert "its policy was a fake, which writes no model: run it with a model" in told
    assert f"{mine} has trained no adapters" in terminal("merge", "mine")[2]

    shutil.copy(mine / "metrics.jsonl", tmp_path / "mine")
    found = terminal("report", "mine")
    both = "mine may be ./mine or runs/mine, and both are folders of runs: write the path of one"
    assert (found.status, both in found.told) == (1, True)
    assert terminal("report", "./mine")[1] == "wrote mine/report.html\n"
    assert terminal("report", "runs/mine")[1].startswith("wrote runs/mine/report.html\n")
