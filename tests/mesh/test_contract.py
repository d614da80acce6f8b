# The classes here are wrong on purpose.
# mypy: disable-error-code="empty-body, override, type-var, no-untyped-def"
# pyright: reportReturnType=false, reportIncompatibleMethodOverride=false, reportInvalidTypeForm=false
# pyright: reportInvalidTypeArguments=false, reportUnknownParameterType=false
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Literal

import numpy as np
import pytest

from meshrl import Actor, Batch, Gather, Mean, Metrics, Replicate, Shard, Sum, endpoint
from meshrl.errors import ContractError
from meshrl.mesh import DP, Same
from meshrl.mesh.contract import read_contract
from meshrl.mesh.sharding import EVERY_RANK

CP_DP = Literal["cp", "dp"]
Stage = Literal["stage"]


class Everything(Actor):
    @endpoint
    async def joint(self, batch: Shard[Batch, CP_DP], scale: float = 1.0) -> Gather[Batch]: ...

    @endpoint
    async def containers(self, values: Shard[dict[str, Batch]], more: Shard[Batch] | None = None) -> Sum[int]: ...

    @endpoint
    async def arrays(
        self, one: Shard[np.ndarray], many: Shard[list[Batch]], maybe: Shard[Batch | None, DP] = None
    ) -> Gather[tuple[np.ndarray, np.ndarray]]: ...

    @endpoint
    async def own_axis(self, batch: Shard[Batch, Stage], whole: Replicate[dict[str, int]]) -> Mean[Metrics, Stage]: ...

    @endpoint
    async def same(self) -> Same[int]: ...

    @endpoint
    async def nothing(self) -> None: ...

    @endpoint
    async def stream(self, batch: Shard[Batch]) -> AsyncIterator[Gather[Batch]]:
        yield batch

    async def not_an_endpoint(self) -> int: ...


def test_marks_are_read_with_their_axes() -> None:
    contract = read_contract(Everything, {"dp": 2, "cp": 2, "stage": 1})
    assert {name: each.shards for name, each in contract.items()} == {
        "joint": {"batch": ("cp", "dp")},
        "containers": {"values": ("dp",), "more": ("dp",)},
        "arrays": {"one": ("dp",), "many": ("dp",), "maybe": ("dp",)},
        "own_axis": {"batch": ("stage",)},
        "same": {},
        "nothing": {},
        "stream": {"batch": ("dp",)},
    }
    assert contract["own_axis"].result.axes == ("stage",)
    assert contract["same"].result.axes == EVERY_RANK
    assert contract["stream"].stream
    assert contract["stream"].result.kind == "gather"


def mistakes_of(cls: type) -> str:
    with pytest.raises(ContractError) as caught:
        read_contract(cls, {"dp": 2})
    return str(caught.value)


def test_every_mistake_is_in_one_error() -> None:
    class Wrong(Actor):
        @endpoint
        async def unmarked(self) -> int: ...

        @endpoint
        async def inside(self, batches: list[Shard[Batch]]) -> None: ...

        @endpoint
        def no_generator(self) -> AsyncIterator[Gather[Batch]]: ...

    first, *lines = mistakes_of(Wrong).splitlines()
    assert first == "Wrong cannot be spawned on a mesh of dp=2:"
    for line, part in zip(
        lines,
        (
            "Wrong.unmarked: the result int of 2 ranks is not marked: write Same[int] if all ranks return the same, ",
            "`batches`: a mark stands inside list[Shard[meshrl.data.batch.Batch]]: write it outermost",
            "Wrong.no_generator: says it returns an AsyncIterator but is not an async generator",
        ),
        strict=True,
    ):
        assert part in line


class Role(Actor, ABC):
    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], scale: float = 1.0) -> Mean[Metrics]: ...


def test_a_backend_inherits_its_roles_marks_and_may_repeat_them() -> None:
    class Backend(Role):
        async def update(self, batch: Batch, scale: float = 1.0, extra: int = 0) -> Metrics: ...

    class Repeated(Role):
        async def update(self, batch: Shard[Batch], scale: float = 1.0) -> Mean[Metrics]: ...

    class Blocking(Role):
        def update(self, batch: Batch, scale: float = 1.0) -> Metrics: ...

    contract = read_contract(Backend, {"dp": 2})
    assert contract["update"].shards == {"batch": ("dp",)}
    assert contract["update"].result.kind == "mean"
    assert list(contract["update"].signature.parameters) == ["batch", "scale", "extra"]
    read_contract(Repeated, {"dp": 2})
    assert "Blocking.update: is not async" in mistakes_of(Blocking)


def test_one_rank_needs_no_mark_on_its_result() -> None:
    class Single(Actor):
        @endpoint
        async def value(self) -> int: ...

    assert read_contract(Single, {"dp": 1})["value"].result.kind == "plain"
