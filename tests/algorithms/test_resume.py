"""A run that is killed, and gone on with or goes on by itself, ends as one that was never interrupted: to the bit."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from meshrl.run import audit_run, run_job
from meshrl.run.jobs import load_job
from tests.algorithms.pages import lines, meshrl, write_task

CONFIG = """
algorithm = "{algorithm}"
steps = 7
run = {{ checkpoint_every = 2, samples_every = 1, meshes.main.cpus = 1 }}
task = {{ source = "rows.jsonl", held_out = 8, held_out_fraction = 0.2 }}
policy.model = {{ characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 2, heads = 2, max_tokens = 16 }}
policy.optimizer = {{ lr = 1e-2, warmup_steps = 4, schedule = "cosine", total_steps = 14 }}
sampling.max_tokens = 5
"""
REWARDED = "reward.function=rewards.py:right_letters"
MORE = {
    "grpo": ["prompts=8", "sampling.n=4", "minibatches=2", REWARDED],
    "grpo on fsdp": ["prompts=8", "sampling.n=4", "policy.backend=fsdp", REWARDED],
    "grpo, written meanwhile": ["prompts=8", "sampling.n=4", "run.checkpoint_async=true", REWARDED],
    "ppo": ["prompts=12", "minibatches=2", "critic.optimizer.lr=1e-2", REWARDED],
}
# The process that needs the reward's is above its supervisors. It is the policy's, and ends in the fourth step if the
# reward is told to end it.
REWARD = """
import os, signal, time
from pathlib import Path

def policy():
    above = Path("/proc", str(os.getppid()))
    while "supervisor.py" in (above / "cmdline").read_text():
        above = above.with_name((above / "stat").read_text().rpartition(")")[2].split()[1])
    return int(above.name)

def right_letters(prompt, completion, row):
    about_to = Path(__file__).with_name("about to die")
    steps = about_to.with_name("runs") / "killed/metrics.jsonl"
    if about_to.exists() and steps.exists() and len(steps.read_bytes().splitlines()) == 3:
        about_to.unlink()
        while not (steps.parent / "checkpoints/step-000002").exists():
            time.sleep(0.01)
        os.kill(policy(), signal.SIGKILL)
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(200)]
    write_task(tmp_path, [{"question": f"{word}>", "answer": word[::-1]} for word in words])
    Path("rewards.py").write_text(REWARD, "utf-8")
    for algorithm in ("grpo", "ppo"):
        Path(f"{algorithm}.toml").write_text(CONFIG.format(algorithm=algorithm), "utf-8")


def outcome(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_bytes())
    return {
        "metrics": lines(folder / "metrics.jsonl"),
        "samples": (folder / "samples.jsonl").read_text("utf-8") if (folder / "samples.jsonl").exists() else "",
        "summary": {key: summary[key] for key in summary if key != "wall_s"},
        "files": {
            str(path.relative_to(folder)): {name: tensor.tobytes() for name, tensor in load_file(path).items()}
            for path in sorted(folder.rglob("*.safetensors"))
        },
    }


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["ppo", *(pytest.param(case, marks=pytest.mark.wide) for case in sorted(MORE) if case != "ppo")]
)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, case: str) -> None:
    """Its own process is killed. `tests/schedules` has the other moments, on fakes."""
    command = ["run", f"{case[:4].strip()}.toml", *MORE[case]]
    assert meshrl(*command, "run.name=whole") == 0
    Path("about to die").touch()
    killed = [sys.executable, "-c", "from meshrl.cli import main; main()", *command, "run.name=killed"]
    ended = subprocess.run(killed, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [path.name for path in Path("runs/killed/checkpoints").glob("step-*")] == ["step-000002"]
    assert meshrl(*command, "run.name=killed", "run.resume=true") == 0
    expected = outcome(tmp_path / "runs/whole")
    state = "shard-00001-model-00001-of-00001.safetensors"
    files = {f"checkpoints/step-000006/0-policy/{state}", "model/model.safetensors"}
    assert files <= set(expected["files"])
    assert outcome(tmp_path / "runs/killed") == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.wide)])
async def test_a_run_whose_policy_is_killed_goes_on_by_itself(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_cluster")

    async def run(name: str) -> Path:
        settings = ["steps=5", "run.log=[]", "run.restarts=1", f"run.engine={engine}", f"run.name={name}"]
        return (await run_job(load_job(Path("grpo.toml"), [*MORE["grpo"], *settings]))).folder.absolute()

    with capture_logs() as logged:
        whole = await run("whole")
        Path("about to die").touch()
        killed = await run("killed")
    assert not Path("about to die").exists()
    (told,) = [line for line in logged if "a machine failed" in line["event"]]
    assert "died" in told["error"]
    assert json.loads((killed / "summary.json").read_bytes())["restarts"] == 1
    audit = audit_run(killed)
    assert audit.holds
    assert audit.resumed == 1
    files = outcome(whole)["files"]
    state = "checkpoints/step-000005/0-policy/shard-00001-model-00001-of-00001.safetensors"
    assert {state, "model/model.safetensors"} <= set(files)
    assert outcome(killed)["files"] == files
