"""Meshes: reserved ranks, arranged along axes, on which actors are spawned."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import ParamSpec, TypeVar, cast

from meshrl.errors import ContractError
from meshrl.events import tell_cores
from meshrl.mesh.actor import Rank
from meshrl.mesh.contract import check_may_shrink, read_contract
from meshrl.mesh.engine import Engine, Resources, Slot
from meshrl.mesh.handle import Deployment, Handle
from meshrl.user_code import signature_of

P = ParamSpec("P")
A = TypeVar("A")


class Mesh:
    """Ranks that are reserved together. Actors on the same mesh share its ranks.

    A mesh of n ranks has the axis `dp=n`. `mesh.shape(dp=2, tp=2)` arranges the same ranks along other axes, so actors
    on the same ranks may have different layouts.
    """

    def __init__(
        self,
        engine: Engine,
        slots: Sequence[Slot],
        axes: Mapping[str, int] | None = None,
        name: str = "mesh",
        min_ranks: int = 0,
        gpus: float = 0.0,
    ) -> None:
        self.name = name
        """The name of the mesh in the events of a run."""
        self._engine, self._slots, self._min_ranks, self._gpus = engine, slots, min_ranks, gpus
        self.axes: Mapping[str, int] = dict(axes) if axes else {"dp": len(slots)}
        """The size of each axis, the last one fastest."""

    @classmethod
    async def reserve(
        cls, engine: Engine, count: int, resources: Resources | None = None, name: str = "mesh", logs: str = ""
    ) -> "Mesh":
        """Reserve `count` ranks of an engine. `logs`: a folder for the output of their processes, as NAME-RANK.log."""
        resources, log = resources or Resources(), f"{logs}/{name.replace('/', '_')}" if logs else ""
        slots = await engine.reserve(count, resources, log)
        # With cpus = 0, a rank shares cores with others.
        tell_cores(name, 0 if resources.cpus == 0 else slots[0].threads)
        return cls(engine, slots, name=name, min_ranks=resources.min_ranks, gpus=resources.gpus)

    def shape(self, **axes: int) -> "Mesh":
        """Arrange the same ranks along these axes, the last one fastest. ContractError if their number differs."""
        written = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        size, ranks = prod(axes.values()), len(self._slots)
        if not axes or min(axes.values()) < 1 or size != ranks:
            raise ContractError(f"mesh.shape({written}): the sizes multiply to {size}, but the mesh has {ranks} ranks")
        return Mesh(self._engine, self._slots, axes, self.name, self._min_ranks, self._gpus)

    async def spawn(self, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """Construct the actor on every rank, and return a handle for all of them, typed as the actor.

        Raises `ContractError` for a class whose endpoints do not fit this mesh, and `RankFailed` if a constructor
        raises. In this case no actor is left running.
        """
        if not isinstance(cls, type):
            kind = type(cls).__name__
            raise ContractError(f"spawn needs an actor class, not a {kind} made already: write spawn({kind}, ...)")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise ContractError(
                f"{cls.__name__} is a role without an implementation of {missing}: spawn a backend's class"
            )
        contract = read_contract(cls, self.axes)
        try:
            signature_of(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise ContractError(f"{cls.__name__}{signature_of(cls)} cannot be constructed: {error}") from None
        check_may_shrink(cls, self.axes, self._min_ranks)
        members = await self._engine.start(self._slots, self._ranks(), cls, args, kwargs)
        away = {member.rank.index for member in members if not member.has_started}
        engine, fewest = self._engine, self._min_ranks
        deployment = Deployment(cls, contract, self.axes, members, engine, self.name, min_ranks=fewest, away=away)
        return cast("A", Handle(deployment))

    async def stop(self) -> None:
        """Stop every actor on the mesh and free its ranks."""
        await self._engine.release(self._slots)

    def __repr__(self) -> str:
        return f"<Mesh {', '.join(f'{axis}={size}' for axis, size in self.axes.items())}>"

    def _ranks(self) -> list[Rank]:
        coordinates = product(*(range(size) for size in self.axes.values()))
        return [
            Rank(index, len(self._slots), dict(zip(self.axes, place, strict=True)), self.axes, slot.threads, self._gpus)
            for index, (place, slot) in enumerate(zip(coordinates, self._slots, strict=True))
        ]
