import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in item.path.parts:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def _hosts_can_be_made() -> None:
    if reason := missing():
        pytest.skip(reason)


REWARD = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""
TASK = """
task = { source = "words.jsonl", held_out = 8, held_out_fraction = 0.2 }
policy.mesh = "train"
policy.model = { characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 2, heads = 2, max_tokens = 16 }
sampling = { n = 4, max_tokens = 5 }
reward.function = "rewards.py:right_letters"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(100)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARD, "utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    resources = [{"train": 1}, {"train": 1}, {"rollout": 2}]
    with Cluster(3, resources=resources, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def healed(three: Cluster) -> Iterator[Cluster]:
    yield three
    for host in three.hosts:
        host.heal()
