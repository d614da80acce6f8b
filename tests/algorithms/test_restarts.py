"""A run whose policy's process is killed goes on by itself, and ends as one that was never interrupted: to the bit."""

import json
import random
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from meshrl import RunConfig
from meshrl.run import audit_run, run_job
from meshrl.run.jobs import load_job

CONFIG = """
algorithm = "grpo"
steps = 5
prompts = 8

[run]
checkpoint_every = 2
restarts = 1
log = []

[run.meshes.main]
cpus = 1

[task]
source = "words.jsonl"
held_out = 4

[policy]
model = { characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 2, heads = 2, max_tokens = 16 }
optimizer = { lr = 1e-2 }

[reward]
function = "rewards.py:right_letters"

[sampling]
n = 4
max_tokens = 5
"""
# The reward is judged in the process of the policy.
REWARD = """
import os, signal
from pathlib import Path

def right_letters(prompt, completion, row):
    about_to = Path(__file__).with_name("about to die")
    if about_to.exists() and len(Path(about_to.read_text()).read_bytes().splitlines()) == 3:
        about_to.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["processes", "ray"])
async def test_a_run_whose_policy_is_killed_goes_on_by_itself(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    monkeypatch.chdir(tmp_path)
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(60)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    Path("words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    Path("rewards.py").write_text(REWARD, "utf-8")
    Path("mine.toml").write_text(CONFIG, "utf-8")

    async def run(name: str) -> Path:
        job = load_job(Path("mine.toml"), [f"run.engine={engine}", f"run.name={name}"], RunConfig)
        return (await run_job(job)).folder.absolute()

    with capture_logs() as logged:
        whole = await run("whole")
        Path("about to die").write_text(str(tmp_path / "runs/killed/metrics.jsonl"), "utf-8")
        killed = await run("killed")
    assert not Path("about to die").exists()
    (told,) = [line for line in logged if "a machine failed" in line["event"]]
    assert "died" in told["error"]
    assert json.loads((killed / "summary.json").read_bytes())["restarts"] == 1
    audit = audit_run(killed)
    assert audit.holds
    assert audit.resumed == 1
    for file in ("model/model.safetensors", "checkpoints/step-000005/0-policy/state.safetensors"):
        tensors = [
            {name: tensor.tobytes() for name, tensor in load_file(run / file).items()} for run in (whole, killed)
        ]
        assert tensors[0] == tensors[1], file
