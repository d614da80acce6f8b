"""A configuration with meshes, for the commands that launch one."""

from pathlib import Path

import pytest

SCRIPT = """
import meshrl as rl
from meshrl.config import Config


class MineConfig(Config):
    steps: int = 2
    policy: rl.PolicyConfig = rl.PolicyConfig(model="", backend="fake", mesh="train")
    sampler: rl.SamplerConfig = rl.SamplerConfig(model="", backend="fake", mesh="rollout")


async def mine(run: rl.Run, config: MineConfig) -> None: ...
"""
CONFIG = """algorithm = "mine.py"
run.name = "mine"
run.meshes.train = {{ ranks = 8, cpus = 4, gpus = {gpus} }}
run.meshes.rollout = {{ ranks = 8, gpus = {share} }}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks of a policy with a GPU each, and of a sampler with half of one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    file = tmp_path / "mine.toml"
    file.write_text(CONFIG.format(gpus=1, share=0.5))
    return file
