"""State of a script's own, which a run keeps in its checkpoints, and the curriculum of docs/extend.md, which is one."""

import re
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import ConfigError, DataError
from meshrl.mesh import Same
from meshrl.roles import Stateful
from tests.algorithms.pages import lines
from tests.run.test_checkpoints import FAKE, TASK, Killed, Script, run


class Replay(Stateful):
    def __init__(self) -> None:
        self.kept: deque[rl.Batch] = deque(maxlen=2)

    @rl.endpoint
    async def exchange(self, batch: rl.Replicate[rl.Batch]) -> Same[rl.Batch]:
        self.kept.append(batch)
        return rl.Batch.concat(list(self.kept))

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        Path(folder).mkdir()
        wires = [batch.to_wire() for batch in self.kept]
        (Path(folder) / "rows").write_bytes(msgspec.msgpack.encode(wires))

    async def restore(self, folder: str) -> None:
        content = (Path(folder) / "rows").read_bytes()
        wires = msgspec.msgpack.decode(content, type=list[tuple[bytes, list[bytes]]])
        self.kept.extend(rl.Batch.from_wire(*wire) for wire in wires)


def replaying(on_a_mesh: bool, name: str | None = "memory", dies_in: int = -1) -> Script:
    async def script(run: rl.Run) -> None:
        policy = await run.spawn(rl.Policy, FAKE)
        memory = await (await run.mesh(1, rl.Resources(cpus=0))).spawn(Replay) if on_a_mesh else Replay()
        if name:
            await run.keep(name, memory)
        rows = TASK.batches(2, run.seed)
        async for step in run.steps(9):
            batch = next(rows)
            rewards = np.sqrt(batch.groups + 0.5).astype(np.float32)
            fresh = await policy.encode(batch.assign(completion=batch["answer"], rewards=rewards))
            every = await memory.exchange(fresh)
            metrics = await policy.update(every, rl.CrossEntropy())
            await run.record(metrics, every, trained=len(every), mixed=float(every.rewards.sum()))
            if step == dies_in:
                raise Killed

    return script


@pytest.mark.parametrize("on_a_mesh", [False, True])
async def test_what_a_script_keeps_is_as_it_was(tmp_path: Path, on_a_mesh: bool) -> None:
    whole = lines(await run(replaying(on_a_mesh), tmp_path, name="whole") / "metrics.jsonl")
    await run(replaying(on_a_mesh, dies_in=6), tmp_path)
    folder = await run(replaying(on_a_mesh), tmp_path)
    assert lines(folder / "metrics.jsonl") == whole
    assert {line["trained"] for line in whole[1:]} == {4}
    assert (folder / "checkpoints" / "step-000009" / "memory" / "rows").is_file()


async def test_what_is_kept_has_the_name_of_the_checkpoint(tmp_path: Path) -> None:
    await run(replaying(on_a_mesh=False, dies_in=6), tmp_path)
    with pytest.raises(ConfigError, match=r"keeps buffer, which .*step-000006 lacks: it has 0-policy, memory"):
        await run(replaying(on_a_mesh=False, name="buffer"), tmp_path)
    with pytest.raises(ConfigError, match="has memory, which the script has not spawned or kept before its loop"):
        await run(replaying(on_a_mesh=False, name=None), tmp_path)
    with pytest.raises(DataError, match=r"run\.keep\('0-policy'\): a name begins with a-z"):
        await run(replaying(on_a_mesh=False, name="0-policy"), tmp_path, name="other")


async def test_what_could_not_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    async def unfit(run: rl.Run) -> None:
        await run.keep("memory", tmp_path)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]

    async def late(run: rl.Run) -> None:
        async for _ in run.steps(2):
            await run.keep("memory", Replay())

    with pytest.raises(DataError, match=r"Path has no checkpoint, written, restore: derive it from `meshrl\.Stateful`"):
        await run(unfit, tmp_path)
    with pytest.raises(DataError, match=r"the loop has begun.*: call it before `run\.steps`"):
        await run(late, tmp_path)


PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


async def test_the_curriculum_of_the_page_goes_on_as_it_was(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(next(block for block in blocks if "class Solved" in block), names)  # noqa: S102 -- of this project
    solved, again = names["Solved"](), names["Solved"]()
    rows = TASK.train.select([3, 3, 5, 5]).assign(groups=np.array([0, 0, 1, 1]), rewards=np.array([1, 1, 1, 0]))
    solved.note(rows)
    before = [batch.objects("prompt") for batch in islice(solved.unsolved(TASK.batches(1, 0), 2, 8), 6)]
    assert not any("d" in prompts for prompts in before), "it is solved"
    assert any("f" in prompts for prompts in before)
    await solved.checkpoint(str(tmp_path / "solved"))
    await again.restore(str(tmp_path / "solved"))
    solved.note(rows.assign(rewards=np.ones(4, np.float32)))
    again.note(rows.assign(rewards=np.ones(4, np.float32)))
    for now in (solved, again):  # what was chosen stays, and from there on the other one is left out
        chosen = [batch.objects("prompt") for batch in islice(now.unsolved(TASK.batches(1, 0), 2, 8), 20)]
        assert chosen[:6] == before
        assert not any({"d", "f"} & {*prompts} for prompts in chosen[8:])
