"""What every engine does for its ranks: isolate values, keep their event loop running, and report errors."""

import asyncio
import copy
import traceback
from pathlib import Path
from typing import Final, TypeVar, cast

from meshrl.errors import ConfigError, ContractError, MeshStopped, unset_variable
from meshrl.mesh import HasRefs, seal_arrays

T = TypeVar("T")

_IMMUTABLE = (type(None), bool, int, float, str, bytes)
_ALONE = (HasRefs, *_IMMUTABLE)
"""Values that share no mutable parts. They are isolated one by one, which is faster than `deepcopy`."""
_ENGINES: Final = str(Path(__file__).parent)


def isolated(value: T) -> T:
    """Return a value that shares no mutable memory with the original. Immutable ones (a `Batch`) are not copied.

    Its arrays are read-only, as with an engine that maps them from a store.
    """
    if isinstance(value, HasRefs):
        return value.__deepcopy__({})
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is tuple:
        items = cast("tuple[object, ...]", value)
        if all(isinstance(item, _ALONE) for item in items):
            return cast("T", tuple([isolated(item) for item in items]))
    alone = copy.deepcopy(value)
    seal_arrays(alone)
    return alone


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until `loop.stop()`. A task's SystemExit, which ends it too, is raised where the task is awaited."""
    while True:
        try:
            loop.run_forever()
            break
        except BaseException:  # noqa: BLE001, S112 -- see above
            continue


def reason_and_traceback(error: BaseException) -> tuple[str, str]:
    """Return an exception's text, and its traceback without the engine's own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_ENGINES)] or frames
    text = f"{''.join(traceback.format_exception_only(error)).strip()}{unset_variable(error)}"
    return text, "".join([*traceback.format_list(own), f"{text}\n"])


def actor_stopped(actor: str, rank: int, endpoint: str) -> MeshStopped:
    """Return the error of a call to a stopped actor."""
    return MeshStopped(f"{actor}.{endpoint} was called on rank {rank}, but the actor is stopped")


def unsendable(where: str, error: Exception) -> ContractError:
    """Return the error for an argument that cannot be copied to a rank, such as a lock or a file."""
    return ContractError(
        f"{where}: an argument cannot be sent to a rank: {error.__cause__ or error}; make it on the rank, in the "
        "actor's constructor"
    )


def check_count(count: int) -> None:
    """Raise ConfigError for a mesh without ranks."""
    if count < 1:
        raise ConfigError(f"a mesh of {count} ranks cannot be reserved: ask for at least 1")
