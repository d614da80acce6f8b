"""Arrays that are made in shared memory: taken whole by a batch, without a copy, and safe from what comes later."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from meshrl.data import frozen
from meshrl.engines.remote import PoolRef
from meshrl.mesh import Share, empty, is_in_place, pool
from meshrl.mesh.shared_memory import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine shares no memory between processes")

MANY = 1 << 16


@pytest.fixture(autouse=True)
def _rank() -> Iterator[None]:
    """This process is as a rank's. Collections pass over what is there before."""
    gc.freeze()
    share, hands_on = pool.share, pool.hands_on
    pool.join(Share.of_run(None), hands_on=True)
    pool.copied = 0
    yield
    gc.collect()
    pool.join(share, hands_on=hands_on)
    gc.unfreeze()


def made(value: float, count: int = MANY) -> np.ndarray:
    array = empty(count, np.float32)
    array[:] = value
    return array


def test_it_has_the_shape_and_dtype_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, dtype in (((3, MANY), np.int64), (MANY, "bfloat16"), ((0, 4), np.int32), (5, bool)):
        array = empty(shape, dtype)
        assert array.shape == np.empty(shape, dtype).shape
        assert array.dtype == dtype
        assert type(array) is np.ndarray
        assert array.flags.writeable
        assert is_in_place(array) is (array.nbytes >= MANY)
    assert empty(np.arange(3).sum(), np.int32).shape == (3,), "a number of numpy is a shape"
    assert empty([np.int64(2), 3], np.int32).shape == (2, 3)
    assert not is_in_place(empty(MANY, object)), "Python values lie in no shared memory"
    monkeypatch.setattr(pool, "hands_on", False)
    assert empty(MANY, np.float32).flags.owndata, "where no rank is a process it is an array as any"


def test_what_can_still_be_written_is_copied() -> None:
    array = made(1.0)
    sealed = array[:]
    sealed.flags.writeable = False  # a view that nobody can write of what can be written
    for part in (array[:100], array.reshape(2, -1), array.view(np.int32), sealed):
        assert not np.shares_memory(frozen(part), array)
    for each in (array, sealed):
        pool.copied = 0
        held = PoolRef.put(each)
        assert pool.copied == array.nbytes
        array[:] = 5
        assert (np.asarray(held.value()) == 1).all()
        array[:] = 1
    array[:] = 5
    assert (frozen(array) == 5).all()


def test_its_memory_is_not_written_anew_while_it_lives_or_is_read() -> None:
    array = frozen(made(1.0))
    held, taken = PoolRef.put(array), pool.share.taken()
    assert pool.copied == 0

    def kept(value: float) -> int:
        gc.collect()
        made(value)
        return pool.share.taken() - taken

    view = array[:10]
    del array
    assert kept(2.0) > 0
    more = kept(2.0)
    assert (view == 1).all()
    del view
    kept(3.0)  # while a reader may come
    values = held.value()
    del held
    kept(4.0)
    assert (np.asarray(values) == 1).all()
    del values
    gc.collect()
    both = [made(5.0), made(6.0)]
    assert pool.share.taken() - taken == more, "both have the memory that was there"
    assert [float(each[0]) for each in both] == [5.0, 6.0]


def test_a_fork_keeps_what_it_was_born_with_and_leaves_the_memory_to_its_parent() -> None:
    array = frozen(made(1.0))
    PoolRef.put(array)
    kept = PoolRef.put(made(3.0))
    gc.collect()
    ours, theirs = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        os.close(begun)
        os.read(ours, 1)  # until the parent has let it go, and written what comes next
        pool.close()  # as at its end
        os._exit(0 if (array == 1).all() else 1)
    os.close(ours)
    os.close(begun)
    os.read(ready, 1)  # until the child has begun
    os.close(ready)
    del array
    gc.collect()
    made(2.0)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (np.asarray(kept.value()) == 3).all()
