import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshrl import Gather, Run, RunConfig, endpoint
from meshrl.engines.ray import RayEngine
from meshrl.errors import RankFailed
from tests.mesh.test_events import Clocked, calls, read
from tests.ray.conftest import NO_CORE


class Timed(Clocked):
    @endpoint
    async def now(self) -> Gather[NDArray[np.float64]]:
        return np.array([time.monotonic()])  # the loop of a rank counts milliseconds


async def test_ranks_run_within_their_calls(engine: RayEngine, tmp_path: Path) -> None:
    async with Run(RunConfig(name="mine", folder=str(tmp_path)), engine=engine) as run:
        clocked = await (await run.mesh(2, NO_CORE)).spawn(Timed)
        ran = await clocked.now() - run.recorder.began
        async for _ in clocked.times(10_000, 0):
            break
        with pytest.raises(RankFailed):
            await clocked.fail(0)
    found = calls(read(run.folder))
    assert {name: call.error for name, (call, _) in found.items()} == {"now": None, "times": None, "fail": "RankFailed"}
    for name, (call, spans) in found.items():
        assert [(span.mesh, span.actor, span.endpoint, span.rank) for span in spans] == [
            ("1", "Timed", name, rank) for rank in range(2)
        ]
        assert all(call.began <= span.began <= span.ended <= call.ended for span in spans)
    assert all(span.began <= at <= span.ended for span, at in zip(found["now"][1], ran, strict=True))
