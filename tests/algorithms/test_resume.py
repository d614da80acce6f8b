"""A run that is killed, and gone on with or goes on by itself, ends as one that was never interrupted: to the bit."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from meshrl import RunConfig
from meshrl.run import audit_run, run_job
from meshrl.run.jobs import load_job
from tests.algorithms.pages import lines, write_task

# Reads commands, a line of JSON each, and runs each in a child of its own: what they import is imported once. A child
# is `meshrl ARGUMENTS`, and kills itself when its moment comes: at the first update of a step, when a checkpoint is to
# get its name, of which half is written, or as soon as there is a checkpoint of that name.
PARENT = """
import asyncio, json, os, pydoc, signal, sys
from itertools import count
from pathlib import Path
import meshrl_fsdp
import meshrl_torch
import reasoning_gym
from meshrl.cli import main

ROLES = [backend.ROLES[role] for backend in (meshrl_torch, meshrl_fsdp) for role in ("Policy", "Critic", "Sampler")
         if role in backend.ROLES]
CLASSES = [pydoc.locate(place.replace(":", ".")) for place in ROLES]

def run(folder, moment, arguments):
    updates = count(1)

    def dying(update):
        async def updating(self, batch, loss):
            metrics = await update(self, batch, loss)
            if moment == f"update {next(updates)}":
                while any(Path("runs").glob("*/checkpoints/.*")):
                    await asyncio.sleep(0.01)  # a checkpoint is written meanwhile, which is to be known to be there
                os.kill(os.getpid(), signal.SIGKILL)
            return metrics
        return updating

    def watch(event, arguments):
        if event == "os.kill":  # this one's own
            return
        if moment == "half written" and event == "os.rename" and "/.step-" in str(arguments[0]):
            next(Path(arguments[0]).rglob("*.safetensors")).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        if moment.startswith("step-") and os.path.isdir(f"runs/killed/checkpoints/{moment}"):
            os.kill(os.getpid(), signal.SIGKILL)

    for policy in [each for each in CLASSES if each.__name__.endswith("Policy")]:
        policy.update = dying(policy.update)
    os.chdir(folder)
    sys.addaudithook(watch)
    main(arguments)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

CONFIG = """
algorithm = "{algorithm}"
steps = 7

[run]
checkpoint_every = 2
samples_every = 1

[run.meshes.main]
cpus = 1

[task]
source = "rows.jsonl"
held_out = 8
held_out_fraction = 0.2

[policy]
model = {{ characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 2, heads = 2, max_tokens = 16 }}

[policy.optimizer]
lr = 1e-2
warmup_steps = 4
schedule = "cosine"
total_steps = 14

[sampling]
max_tokens = 5
"""
REWARDED = "reward.function=rewards.py:right_letters"
MORE = {
    "grpo": ["prompts=8", "sampling.n=4", "minibatches=2", REWARDED],
    "grpo on fsdp": ["prompts=8", "sampling.n=4", "policy.backend=fsdp", REWARDED],
    "grpo, written meanwhile": ["prompts=8", "sampling.n=4", "run.checkpoint_async=true", REWARDED],
    "ppo": ["prompts=12", "minibatches=2", "critic.optimizer.lr=1e-2", REWARDED],
    "sft": ["rows=8"],
}
NARROW = ("ppo", "grpo on fsdp")
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


Start = Callable[..., int]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs read: `ALGORITHM.toml`, rows and a reward."""
    monkeypatch.chdir(tmp_path)
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(200)]
    write_task(tmp_path, [{"question": f"{word}>", "answer": word[::-1]} for word in words])
    Path("rewards.py").write_text(REWARD, "utf-8")
    for algorithm in ("grpo", "ppo", "sft"):
        Path(f"{algorithm}.toml").write_text(CONFIG.format(algorithm=algorithm), "utf-8")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Run the command in a process of its own, perhaps killed at some moment; its exit status."""
    said = tmp_path_factory.mktemp("said") / "stderr"
    with (
        said.open("wb") as log,
        subprocess.Popen([sys.executable, "-c", PARENT], stdin=PIPE, stdout=PIPE, stderr=log, text=True) as parent,
    ):
        assert parent.stdin
        assert parent.stdout
        tell, hear = parent.stdin, parent.stdout

        def command(folder: Path, config: str, arguments: Sequence[str], moment: str = "") -> int:
            words = ["run", config, *arguments]
            print(json.dumps({"folder": str(folder), "moment": moment, "arguments": words}), file=tell)
            tell.flush()
            while not (line := hear.readline().strip()).removeprefix("-").isdigit():
                assert parent.poll() is None, said.read_text("utf-8")  # else it is what the command printed
            assert int(line) in (0, -signal.SIGKILL), said.read_text("utf-8")
            return int(line)

        yield command
        tell.close()


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves but for times."""
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
    "case", [*NARROW, *(pytest.param(case, marks=pytest.mark.wide) for case in sorted(MORE) if case not in NARROW)]
)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, start: Start, case: str) -> None:
    algorithm = case[:4].strip()
    assert start(tmp_path, f"{algorithm}.toml", [*MORE[case], "run.name=whole"]) == 0
    updates = 2 if "minibatches=2" in MORE[case] else 1  # of the policy in a step
    resumed = [*MORE[case], "run.name=killed", "run.resume=true"]
    for moment, whole in {
        "update 1": [],
        f"update {2 * updates + 1}": ["step-000002"],  # the first of the third step
        "half written": ["step-000002"],
        "step-000006": ["step-000002", "step-000004", "step-000006"],
    }.items():
        assert start(tmp_path, f"{algorithm}.toml", resumed, moment) == -signal.SIGKILL, moment
        assert sorted(path.name for path in Path("runs/killed/checkpoints").glob("step-*")) == whole, moment
    assert start(tmp_path, f"{algorithm}.toml", resumed) == 0
    expected = outcome(tmp_path / "runs/whole")
    state = "shard-00001-model-00001-of-00001" if "fsdp" in case else "state"
    assert {f"checkpoints/step-000006/0-policy/{state}.safetensors", "model/model.safetensors"} <= set(
        expected["files"]
    )
    assert outcome(tmp_path / "runs/killed") == expected


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.wide)])
async def test_a_run_whose_policy_is_killed_goes_on_by_itself(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_cluster")

    async def run(name: str) -> Path:
        settings = ["steps=5", "run.log=[]", "run.restarts=1", f"run.engine={engine}", f"run.name={name}"]
        return (await run_job(load_job(Path("grpo.toml"), [*MORE["grpo"], *settings], RunConfig))).folder.absolute()

    with capture_logs() as logged:
        whole = await run("whole")
        Path("about to die").write_text(str(Path("runs/killed/metrics.jsonl").absolute()), "utf-8")
        killed = await run("killed")
    assert not Path("about to die").exists()
    (told,) = [line for line in logged if "a machine failed" in line["event"]]
    assert "died" in told["error"]
    assert json.loads((killed / "summary.json").read_bytes())["restarts"] == 1
    audit = audit_run(killed)
    assert audit.holds
    assert audit.resumed == 1
    files = outcome(whole)["files"]
    assert {"checkpoints/step-000005/0-policy/state.safetensors", "model/model.safetensors"} <= set(files)
    assert outcome(killed)["files"] == files
