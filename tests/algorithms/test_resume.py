"""A run that is killed again and again, and gone on with, ends as one that was never interrupted: to the bit."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
from safetensors.numpy import load_file

# Reads commands, a line of JSON each, and runs each in a child of its own: what they import is imported once. A child
# is `meshrl ARGUMENTS`, and is killed when the moment comes for the `last` time.
PARENT = """
import asyncio, json, os, signal, sys
from itertools import count
from pathlib import Path
import reasoning_gym
import meshrl_hf.state
from meshrl.run.checkpoints import Checkpoints
from meshrl.cli import main
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import spread_state
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler

def run(folder, moment, last, arguments):
    came = count(1)

    def perhaps_die(now, *half_done):
        if moment == now and next(came) == last:
            for file in half_done:
                Path(file).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    save_file, save, clean_up = meshrl_hf.state.save_file, spread_state.write_boxes, Checkpoints._clean_up

    def dying(update):
        async def updating(self, batch, loss):
            metrics = await update(self, batch, loss)
            while moment == "in a step" and any(Path("runs").glob("*/checkpoints/.*")):
                await asyncio.sleep(0.01)  # a checkpoint is written meanwhile: which comes first is to be known here
            perhaps_die("in a step")
            return metrics
        return updating

    def saving(tensors, file):
        perhaps_die("while a checkpoint is written", file)
        save_file(tensors, file)

    def saving_boxes(file, boxes):
        perhaps_die("while a checkpoint is written", file)
        save(file, boxes)

    def cleaning_up(self):
        if self._actors:  # not before the run begins
            perhaps_die("between two steps")
        clean_up(self)

    for policy in TorchPolicy, FsdpPolicy:
        policy.update = dying(policy.update)
    meshrl_hf.state.save_file, spread_state.write_boxes = saving, saving_boxes
    Checkpoints._clean_up = cleaning_up
    os.chdir(folder)
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
source = "words.jsonl"
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
REWARD = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""


Start = Callable[..., int]


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

        def command(folder: Path, config: str, arguments: Sequence[str], moment: str = "", last: int = 0) -> int:
            words = ["run", config, *arguments]
            print(json.dumps({"folder": str(folder), "moment": moment, "last": last, "arguments": words}), file=tell)
            tell.flush()
            while not (line := hear.readline().strip()).removeprefix("-").isdigit():
                assert parent.poll() is None, said.read_text("utf-8")  # else it is what the command printed
            assert int(line) in (0, -signal.SIGKILL), said.read_text("utf-8")
            return int(line)

        yield command
        tell.close()


def outcome(folder: Path) -> dict[str, Sequence[object] | Mapping[str, object] | str]:
    """All that a run leaves but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_bytes())
    return {
        "metrics": [{key: line[key] for key in line if key not in ("seconds", "step_s")} for line in lines],
        "samples": (folder / "samples.jsonl").read_text("utf-8") if (folder / "samples.jsonl").exists() else "",
        "summary": {key: summary[key] for key in summary if key != "wall_s"},
        "files": {
            str(path.relative_to(folder)): {name: tensor.tobytes() for name, tensor in load_file(path).items()}
            for path in sorted(folder.rglob("*.safetensors"))
        },
    }


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", sorted(MORE))
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, start: Start, case: str) -> None:
    algorithm = case[:4].strip()
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(200)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARD, "utf-8")
    (tmp_path / "mine.toml").write_text(CONFIG.format(algorithm=algorithm), "utf-8")

    assert start(tmp_path, "mine.toml", [*MORE[case], "run.name=whole"]) == 0
    updates = 2 if "minibatches=2" in MORE[case] else 1  # of the policy in a step
    actors = 2 if algorithm == "ppo" else 1  # in a checkpoint
    for moment, last, whole in [
        ("in a step", 1, []),
        ("in a step", 2 * updates + 1, ["step-000002"]),  # the first update of the third step
        ("while a checkpoint is written", actors, ["step-000002"]),
        ("between two steps", 2, ["step-000002", "step-000004", "step-000006"]),
    ]:
        resumed = [*MORE[case], "run.name=killed", "run.resume=true"]
        assert start(tmp_path, "mine.toml", resumed, moment, last) == -signal.SIGKILL, moment
        assert sorted(path.name for path in (tmp_path / "runs/killed/checkpoints").glob("step-*")) == whole, moment
    assert start(tmp_path, "mine.toml", resumed) == 0
    expected = outcome(tmp_path / "runs/whole")
    state = "shard-00001-model-00001-of-00001" if "fsdp" in case else "state"
    assert {f"checkpoints/step-000006/0-policy/{state}.safetensors", "model/model.safetensors"} <= set(
        expected["files"]
    )
    assert outcome(tmp_path / "runs/killed") == expected
