"""What roles of one process share: their process groups, made once, by whichever of its threads comes first."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from meshrl_hf.group import Shared


def test_threads_that_ask_at_the_same_time_share_what_one_of_them_makes() -> None:
    shared: Shared[object] = Shared()
    start, made, pause = Barrier(4), list[object](), Event()

    def make() -> object:
        pause.wait(0.05)  # so that others come before it is made
        made.append(object())
        return made[-1]

    def ask(_: int) -> object:
        start.wait()
        return shared.get("key", make)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    assert found == made * 4


def test_what_is_of_an_old_default_group_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Shared[list[str]] = Shared()
    first = shared.get((0, 1), list)
    assert shared.get((0, 1), list) is first
    assert shared.get((0,), list) is not first
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))
    again = shared.get((0, 1), list)
    assert again is not first
    assert shared.get((0, 1), list) is again
