"""What the annotations of a script say travels with its handles, and its errors name its lines."""

import pickle
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, cast

import cloudpickle
import numpy as np
import pytest
import pytest_asyncio

from meshrl import Batch, LocalEngine, Mesh
from meshrl.engines.processes import ProcessEngine
from meshrl.tasks.function import load_function
from meshrl.user_code import import_file, pickled, place_of

if TYPE_CHECKING:
    from collections import ChainMap

FUTURE = "from __future__ import annotations\n"
HEAD = """\
from collections.abc import AsyncIterator
from typing import Optional, Self
import numpy as np
import meshrl as rl
from meshrl import Actor, Batch, Gather, Shard, Sum, endpoint
"""
COUNTER = """
class Counter(Actor):
    @endpoint
    async def count(self, batch: Shard[Batch], scale: int = 1) -> Sum[int]:
        return scale * len(batch)

    @endpoint
    async def rows(self, batch: rl.Shard[rl.Batch]) -> AsyncIterator[rl.Gather[rl.Batch]]:
        yield batch

class Asker(Actor):
    @endpoint
    async def ask(self, counter: Counter, batch: Shard[Batch]) -> Sum[int]:
        seen = [each async for each in counter.rows(batch)]
        return await counter.count(batch, scale=10) + sum(map(len, seen))
"""
PAIR = """
def make():
    class Pair(Actor):
        @endpoint
        async def ask(self, other: OTHER, batch: Shard[Batch]) -> Sum[int]:
            return await other.count(None, batch)

        @endpoint
        async def count(self, other: Optional["Pair"], batch: Shard[Batch]) -> Sum[int]:
            return 11 * len(batch)
    class Heir(Pair):
        @endpoint
        async def count(self, other: Optional["Heir"], batch: Shard[Batch]) -> Sum[int]:
            return 11 * len(batch)
    return CLASS

Counter = Asker = make()
"""
SCRIPTS = {
    "of texts": FUTURE + HEAD + COUNTER,
    "evaluated": HEAD + COUNTER,
    "of the own class": HEAD + PAIR.replace("OTHER", '"Pair"').replace("CLASS", "Pair"),
    "of the own class, all of texts": FUTURE + HEAD + PAIR.replace("OTHER", "Pair").replace("CLASS", "Pair"),
    "of a base, and of the class that overrides": HEAD + PAIR.replace("OTHER", '"Pair"').replace("CLASS", "Heir"),
    "of Self": HEAD + PAIR.replace("OTHER", "Self").replace("CLASS", "Pair"),
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    engine = ProcessEngine()
    yield await Mesh.reserve(engine, 1)
    await engine.close()


def script(text: str, folder: Path) -> ModuleType:
    (folder / "script.py").write_text(text, "utf-8")
    return import_file(folder / "script.py")


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.asyncio(loop_scope="session")
async def test_an_actor_calls_another_whose_contract_came_along(text: str, tmp_path: Path, mesh: Mesh) -> None:
    module = script(text, tmp_path)
    asker, counter = await mesh.spawn(module.Asker), await mesh.spawn(module.Counter)
    assert await asker.ask(counter, Batch.of(a=np.arange(3))) == 33


async def test_a_handle_that_travelled_refuses_wrong_calls_and_leaves_types_and_defaults_behind(tmp_path: Path) -> None:
    lock = FUTURE + HEAD + "import threading\n" + COUNTER.replace("int = 1", "object = threading.Lock()")
    engine = LocalEngine(cores=1)
    handle = await (await Mesh.reserve(engine, 1)).spawn(script(lock, tmp_path).Counter)
    travelled = pickle.loads(pickle.dumps(handle.count.endpoint))  # no pickle could hold the default  # noqa: S301
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        travelled.signature.bind()
    await engine.close()


@pytest.fixture(params=["with its file", "without, as since cloudpickle 3.1.3"])
def newest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param.startswith("with "):
        (table, *_) = cast("ChainMap[type, Callable[..., object]]", cloudpickle.Pickler.dispatch_table).maps
        reduce = table[CodeType]
        monkeypatch.setitem(table, CodeType, lambda code: reduce(code.replace(co_filename="<dynamic-code>")))


RAISES = """\
from functools import partial
def outer(prompt, completion, row):
    return [inner(each) for each in [row]][0]

def inner(row):
    raise KeyError("absent")

class Judge:
    def __call__(self, prompt, completion, row):
        return (lambda row: inner(row))(row)

judge, again = Judge(), partial(outer, "")
"""


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("name", ["outer", "judge", "again"])
def test_code_that_travels_by_value_keeps_its_file_and_lines(name: str, tmp_path: Path) -> None:
    module = script(RAISES, tmp_path)
    cloudpickle.register_pickle_by_value(module)
    travelled = pickle.loads(pickled(getattr(module, name)))  # noqa: S301
    with pytest.raises(KeyError) as raised:
        travelled(*[{}] * (2 if name == "again" else 3))
    assert place_of(raised.value) == f"{tmp_path}/script.py, line 6"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="earlier versions evaluate annotations at once")
def test_lazy_annotations_may_name_what_only_checkers_import(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rows import Row\n"
    text += "def judge(prompt: str, completion: str, row: Row) -> float:\n    return 1.0\n"
    module = script(text, tmp_path)
    cloudpickle.register_pickle_by_value(module)
    assert load_function(f"{tmp_path}/script.py:judge")("", "", {}) == 1.0
    assert pickle.loads(pickled(module.judge))("", "", {}) == 1.0  # noqa: S301
