"""What a page of one's own does wrong is told by its own lines."""

from pathlib import Path

from tests.first_hour.terminal import refused, type_in

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


def test_a_mistake_in_a_page_is_told_with_its_lines() -> None:
    (page := Path("mine.py").resolve()).write_text(PAGE.format(wrong="batch['advantage']"), "utf-8")
    config = 'algorithm = "mine.py"\npolicy = { backend = "fake", model = "none" }\n'
    Path("mine.toml").write_text(config, "utf-8")
    told = refused("run", "mine.toml")
    assert "the batch has no column `advantage`" in told
    assert f"({page}, line 10)" in told

    for wrong, error in (("1 / 0", "ZeroDivisionError"), ("__import__('json').loads('{')", "JSONDecodeError")):
        page.write_text(PAGE.format(wrong=wrong), "utf-8")
        told = type_in("run", "mine.toml").err
        assert [line.strip() for line in told.splitlines() if "File" in line] == [
            f'File "{page}", line {line}, in {name}' for line, name in ((17, "mine"), (10, "wrong"))
        ]
        assert told.splitlines()[-1].startswith(f"{error}: ")
