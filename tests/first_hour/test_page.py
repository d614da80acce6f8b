"""What a page of one's own does wrong is told by its own lines."""

from pathlib import Path

from tests.first_hour.terminal import Terminal

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


def test_a_mistake_in_a_page_is_told_with_its_lines(tmp_path: Path, terminal: Terminal) -> None:
    def failed(wrong: str) -> str:
        (tmp_path / "mine.toml").write_text(CONFIG, "utf-8")
        (tmp_path / "mine.py").write_text(PAGE.replace("{wrong}", wrong), "utf-8")
        status, _, err = terminal("run", "mine.toml")
        assert status == 1
        return err

    told = failed("batch['advantage']")
    assert "the batch has no column `advantage`" in told
    assert f"({tmp_path}/mine.py, line 10)" in told
    assert "Traceback" not in told
    for wrong, error in (("1 / 0", "ZeroDivisionError"), ("__import__('json').loads('{')", "JSONDecodeError")):
        told = failed(wrong)
        assert [line.strip() for line in told.splitlines() if "File" in line] == [
            f'File "{tmp_path}/mine.py", line {line}, in {name}' for line, name in ((17, "mine"), (10, "wrong"))
        ]
        assert told.splitlines()[-1].startswith(f"{error}: ")
