"""What ranks have of the process that they are forked from, and what that process outlives."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshrl import Actor, Mesh, Same, each, endpoint
from meshrl.engines.processes import ProcessEngine
from tests.processes.conftest import NO_CORE

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

PRINTS = """
import asyncio
from meshrl import Actor, Mesh, Resources, endpoint
from meshrl.engines.processes import ProcessEngine

class Prints(Actor):
    @endpoint
    async def say(self) -> None:
        print("a rank says so")

async def main():
    engine = ProcessEngine(modules=["says_hello"])
    prints = await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Prints)
    await prints.say()
    await engine.close()

asyncio.run(main())
"""


class Rank(Actor):
    @endpoint
    async def draw(self) -> Same[float]:
        return float(np.random.random())  # noqa: NPY002 -- what older code draws from


async def test_what_ranks_print_into_a_pipe_is_there_and_what_they_are_made_of_prints_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    (tmp_path / "says_hello.py").write_text("print('hello')")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""},
    )
    assert sorted(done.stdout.splitlines()) == ["a rank says so", "a rank says so", "hello"]


async def test_ranks_do_not_draw_the_same_numbers() -> None:
    engine = ProcessEngine(modules=["numpy.random"])
    ranks = await (await Mesh.reserve(engine, 4, NO_CORE)).spawn(Rank)
    assert len(set(await each(ranks.draw)())) == 4
    await engine.close()
