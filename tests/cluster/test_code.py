from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Host

PROJECT = {
    "train.py": """
import socket
from importlib.util import find_spec

import helper
import meshrl as rl
from meshrl.config import Config
from meshrl.mesh import Same
from mine.words import word


class TrainConfig(Config):
    reward: rl.RewardConfig


class Reads(rl.Actor):
    @rl.endpoint
    async def read(self) -> Same[str]:
        import late
        with open("prompt.txt") as prompt:
            read = prompt.read().strip()
        return f"{helper.VALUE} {word()} {late.VALUE} {read} {find_spec('secret')} on {socket.gethostname()}"


async def train(run: rl.Run, config: TrainConfig) -> None:
    there = rl.Resources(cpus=0, custom={"node2": 1})
    reads = await (await run.mesh(1, there)).spawn(Reads)
    print("read:", await reads.read())
    reward = await run.spawn(rl.Reward, config.reward)
    scored = await (await reward.score(rl.Batch.of(prompt=["a"], completion=["b"]))).load()
    print("reward:", scored.rewards.tolist(), scored.objects("reward_error"))
""",
    "helper.py": "VALUE = 'helper'\n",
    "late.py": "VALUE = 'late'\n",
    "secret.py": "VALUE = 'secret'\n",
    "prompt.txt": "prompt\n",
    ".gitignore": "secret.py\n",
    "mine/__init__.py": "",
    "mine/words.py": "def word():\n    return 'word'\n",
    "rewards/letters.py": "import scale\n\n\ndef letters(prompt, text, row):\n    return scale.HALF * len(text)\n",
    "rewards/scale.py": "HALF = 0.5\n",
    "my.toml": """
algorithm = "train.py"
run = { name = "mine", meshes.reward = { cpus = 0, custom = { node2 = 1 } } }
reward = { mesh = "reward", function = "rewards/letters.py:letters" }
""",
}
PLACE = "/tmp/project"  # noqa: S108 -- each host's own


def bring(host: Host, files: dict[str, str], shared: Path) -> None:
    for name, text in files.items():
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text(text, "utf-8")
    host.run(["cp", "-r", str(shared), PLACE])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        bring(cluster.hosts[0], PROJECT, tmp_path_factory.mktemp("project"))
        yield cluster


def ran(cluster: Cluster) -> str:
    command = ["env", "-C", PLACE, "meshrl", "run", "my.toml", f"run.engine={cluster.address}"]
    return cluster.hosts[0].run(command)


def test_what_is_on_the_first_host_alone_is_found_on_the_second(two: Cluster) -> None:
    said = ran(two)
    assert "read: helper word late prompt None on node2" in said, said
    assert "reward: [0.5] (None,)" in said, said
    assert "no such file" in two.hosts[1].run(["sh", "-c", f"ls {PLACE} 2>&1 || true"]).lower()


def test_the_controllers_files_are_used_where_the_other_host_has_older_ones(two: Cluster, tmp_path: Path) -> None:
    older = {name: text.replace("'helper'", "'old'").replace("'word'", "'old'") for name, text in PROJECT.items()}
    bring(two.hosts[1], older, tmp_path)
    two.hosts[0].run(["sh", "-c", f"echo \"VALUE = 'newer'\" > {PLACE}/helper.py"])
    said = ran(two)
    assert "read: newer word late prompt " in said, said
