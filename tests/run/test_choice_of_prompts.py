"""The curriculum of docs/extend.md: a run that was interrupted chooses the prompts of one that was not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import meshrl as rl
from meshrl.run import MeshConfig, audit_run
from tests.run.test_checkpoints import Killed, lines

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FAKE: dict[str, Any] = {"backend": "fake", "model": "none"}


def of_page() -> Any:
    """The page's class."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(next(block for block in blocks if "class Solved" in block), names)  # noqa: S102 -- of this project
    return names["Solved"]()


async def train(name: str, ahead: int, dies: int = -1) -> Path:
    """Twelve steps, which end early once all ten prompts are solved, or because it is killed after step `dies`."""
    config = rl.RunConfig(name=name, checkpoint_every=1, resume=True, meshes={"main": MeshConfig(cpus=0)})
    async with rl.Run(config) as run:
        task = rl.Task.load(rl.TaskConfig(source="sums.jsonl", held_out=0))
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(**FAKE))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(**FAKE))
        reward = await run.spawn(rl.Reward, rl.RewardConfig())
        await rl.publish(policy, sampler)
        solved = await run.keep("solved", of_page())
        prompts = solved.unsolved(task.batches(1, run.seed), 4, len(task.train))
        sampling = rl.GroupSampling(n=2)
        async with rl.rollouts(sampler, prompts, sampling, ahead=ahead, score=reward.score) as stream:
            async for step in run.steps(12):
                batch = await anext(stream, None)
                if batch is None:
                    break
                batch = await batch.load("prompt", "groups", "rewards")
                solved.note(batch)
                batch = batch.assign(advantages=rl.leave_one_out(batch.rewards, batch.groups))
                metrics = await policy.update(batch, rl.ClippedLoss(clip=0.2))
                await rl.publish(policy, stream)
                await run.record(metrics, batch, known=len(solved.prompts))
                if step == dies:
                    raise Killed
    return run.folder


def told(folder: Path) -> list[tuple[float, float]]:
    """The reward and the number of solved prompts of each step."""
    return [(line["reward"], line["known"]) for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_resumed_run_makes_the_choices_of_one_without_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.chdir(tmp_path)
    sums = (json.dumps({"question": f"{number}+1=", "answer": str(number + 1)}) for number in range(10))
    Path("sums.jsonl").write_text("\n".join(sums), "utf-8")
    whole = told(await train("whole", ahead))
    assert 0 < whole[3][1] < 10  # some are left out by then
    for dies in (2, 6) if not ahead else (4,):
        with pytest.raises(Killed):
            await train(f"dies{dies}", ahead, dies)
        folder = await train(f"dies{dies}", ahead)
        assert not audit_run(folder).missing
        assert ahead or told(folder) == whole
