"""What a page of one's own does wrong is told by its own lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

Terminal = Callable[..., tuple[int, str, str]]

PAGE = """
import meshrl as rl


class MineConfig(rl.AlgorithmConfig):
    policy: rl.PolicyConfig


def wrong(batch):
    return {wrong}


async def mine(run: rl.Run, config: MineConfig) -> None:
    policy = await run.spawn(rl.Policy, config.policy)
    async for _ in run.steps(1):
        batch = await policy.encode(rl.Batch.of(prompt=["1"], completion=["1"]))
        wrong(batch)
        await policy.update(batch, rl.PolicyGradient())
"""
CONFIG = 'algorithm = "mine.py"\npolicy = { backend = "fake", model = "none" }\n'


@pytest.fixture
def failed(tmp_path: Path, terminal: Terminal) -> Callable[[str], str]:
    """What is told of a page with this expression in line 10."""

    def run(wrong: str) -> str:
        (tmp_path / "mine.toml").write_text(CONFIG, "utf-8")
        (tmp_path / "mine.py").write_text(PAGE.replace("{wrong}", wrong), "utf-8")
        status, _, err = terminal("run", "mine.toml")
        assert status == 1
        return err

    return run


def test_a_column_that_is_not_there_is_told_with_its_line(tmp_path: Path, failed: Callable[[str], str]) -> None:
    told = failed("batch['advantage']")
    assert "the batch has no column `advantage`" in told
    assert f"({tmp_path}/mine.py, line 10)" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("wrong", "error"), [("1 / 0", "ZeroDivisionError"), ("__import__('json').loads('{')", "JSONDecodeError")]
)
def test_an_error_of_python_is_told_by_the_pages_lines(
    wrong: str, error: str, tmp_path: Path, failed: Callable[[str], str]
) -> None:
    told = failed(wrong)
    places = [line.strip() for line in told.splitlines() if "File" in line]
    assert places == [
        f'File "{tmp_path}/mine.py", line {line}, in {name}' for line, name in ((17, "mine"), (10, "wrong"))
    ]
    assert told.splitlines()[-1].startswith(f"{error}: ")
