"""Arrays that are made in shared memory: taken whole by a batch, without a copy, and safe from what comes later."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from meshrl import Batch, Ragged
from meshrl.data.ragged import frozen
from meshrl.engines.transport import PoolRef
from meshrl.mesh import Share, empty, is_in_place, pool
from meshrl.mesh.shared_memory import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine shares no memory between processes")

MANY = 1 << 16


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is as a rank's."""
    for name, value in {"share": Share(), "hands_on": True, "copied": 0}.items():
        monkeypatch.setattr(pool, name, value)
    yield
    gc.collect()


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def made(value: float, count: int = MANY) -> np.ndarray:
    array = empty(count, np.float32)
    array[:] = value
    return array


def test_a_batch_takes_it_and_hands_it_on_without_a_copy() -> None:
    array = made(1.0)
    batch = Batch.of(rewards=array, hidden=Ragged(made(2.0), [0, *range(1, MANY), MANY]))
    assert batch["rewards"] is array
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    held = PoolRef.put(batch)
    assert pool.copied < MANY * 9  # the offsets alone
    again = held.value()
    assert again == batch


def test_it_has_the_shape_and_dtype_that_were_asked_for() -> None:
    for shape, dtype in (((3, MANY), np.int64), (MANY, "bfloat16"), ((0, 4), np.int32), (5, bool)):
        array = empty(shape, dtype)
        assert array.shape == np.empty(shape, dtype).shape
        assert array.dtype == dtype
        assert type(array) is np.ndarray
        assert array.flags.writeable
        assert is_in_place(array) is (array.nbytes >= MANY)


def test_python_values_lie_in_no_shared_memory() -> None:
    assert not is_in_place(empty(MANY, object))


def test_where_no_rank_is_a_process_it_is_an_array_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "hands_on", False)
    assert empty(MANY, np.float32).flags.owndata


def test_a_part_of_it_is_copied_while_the_whole_can_be_written() -> None:
    array = made(1.0)
    for part in (array[:100], array.reshape(2, -1), array.view(np.int32)):
        sealed = part[:]
        sealed.flags.writeable = False
        for each in (part, sealed):
            taken = frozen(each)
            assert address(taken) != address(each)
    array[:] = 5
    assert (frozen(array) == 5).all()


def test_what_can_still_be_written_is_copied_into_shared_memory() -> None:
    array = made(1.0)
    held = PoolRef.put(array)
    assert pool.copied == array.nbytes
    array[:] = 2
    assert (np.asarray(held.value()) == 1).all()


def test_a_view_that_nobody_can_write_of_what_can_be_written_is_copied() -> None:
    array = made(1.0)
    view = array[:]
    view.flags.writeable = False
    held = PoolRef.put(view)
    assert pool.copied == array.nbytes
    array[:] = 5
    assert (np.asarray(held.value()) == 1).all()


def test_a_number_of_numpy_is_a_shape() -> None:
    assert empty(np.arange(3).sum(), np.int32).shape == (3,)
    assert empty([np.int64(2), 3], np.int32).shape == (2, 3)


def test_its_memory_is_not_written_anew_while_it_lives_or_is_read() -> None:
    array = frozen(made(1.0))
    held, place = PoolRef.put(array), address(array)
    assert pool.copied == 0
    view = array[:10]
    del array
    gc.collect()
    assert address(made(2.0)) != place
    del view
    gc.collect()
    assert address(made(3.0)) != place  # a reader may come
    values = held.value()
    del held
    gc.collect()
    assert address(made(4.0)) != place
    assert (np.asarray(values) == 1).all()
    del values
    gc.collect()
    assert address(made(5.0)) == place


def test_what_was_received_is_handed_on_where_it_lies() -> None:
    columns = {name: np.full(MANY, value, np.float32) for value, name in enumerate("abc")}
    received = PoolRef.put(columns).value()
    assert isinstance(received, dict)
    pool.copied = 0
    one = PoolRef.put(received["a"])
    assert pool.copied == 0
    small = PoolRef.put(received["a"][: MANY // 4])  # the whole would be kept for its sake
    assert pool.copied == MANY
    del received
    gc.collect()
    for value in range(4):
        PoolRef.put({name: np.full(MANY, value + 7, np.float32) for name in "abc"})
    assert np.array_equal(np.asarray(one.value()), columns["a"])
    assert np.array_equal(np.asarray(small.value()), columns["a"][: MANY // 4])


def test_a_fork_keeps_what_it_was_born_with() -> None:
    array = frozen(made(1.0))
    PoolRef.put(array)
    gc.collect()
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)  # until the parent has let it go, and written what comes next
        os._exit(0 if (array == 1).all() else 1)
    os.close(ours)
    del array
    gc.collect()
    made(2.0)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
