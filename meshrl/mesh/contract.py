"""Contracts: an actor's endpoints, read once from their annotations when it is spawned."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshrl.errors import ContractError
from meshrl.mesh.actor import Actor, is_endpoint
from meshrl.mesh.contract_checks import kind_mistakes, override_mistakes, parameter_mistakes, result_mistakes
from meshrl.mesh.marks import Axes, Mark, read_marks


@dataclass(frozen=True)
class Endpoint:
    """The contract of one endpoint."""

    name: str
    signature: inspect.Signature
    """The signature without `self`."""
    shards: Mapping[str, Axes]
    """The sharded parameters and the axes that each is split over."""
    result: Mark
    stream: bool
    """True for an async generator, whose values are passed on as a rank yields them."""


Contract = Mapping[str, Endpoint]


def read_contract(cls: type, shape: Mapping[str, int]) -> Contract:
    """Read the contract of `cls` on a mesh of this shape.

    Raises `ContractError` that lists every mistake: class, endpoint, parameter and what to write instead.
    """
    if not issubclass(cls, Actor):
        raise ContractError(f"{cls.__name__} is not an actor: write `class {cls.__name__}(meshrl.Actor)`")
    mistakes: list[str] = []
    contract: dict[str, Endpoint] = {}
    for name, owner, function in _declared(cls):
        found = _read_endpoint(cls, owner, name, function, shape)
        if isinstance(found, Endpoint):
            contract[name] = found
        else:
            mistakes += [f"{cls.__name__}.{name}: {mistake}" for mistake in found]
    if mistakes:
        on = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        lines = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise ContractError(f"{cls.__name__} cannot be spawned on a mesh of {on}:\n{lines}")
    return contract


def _declared(cls: type) -> list[tuple[str, type, Callable[..., object]]]:
    """List each endpoint with the class that declared it first, which is the role if there is one."""
    found: dict[str, tuple[type, Callable[..., object]]] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and is_endpoint(value) and name not in found:
                found[name] = (owner, value)
    return [(name, owner, function) for name, (owner, function) in found.items()]


def _read_endpoint(
    cls: type, owner: type, name: str, function: Callable[..., object], shape: Mapping[str, int]
) -> Endpoint | list[str]:
    try:
        marks, stream = read_marks(function)
    except NameError as error:
        return [f"the annotation {error.name!r} is not known at run time: import it outside `if TYPE_CHECKING`"]
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    result = marks.pop("return", Mark("missing", (), None))
    mistakes = kind_mistakes(cls, name, stream)
    for parameter, mark in marks.items():
        mistakes += parameter_mistakes(parameter, mark, shape)
    mistakes += result_mistakes(result, shape, stream)
    override = inspect.getattr_static(cls, name)
    if override is not function and inspect.isfunction(override):
        mistakes += override_mistakes(owner, signature, marks, result, override)
    if mistakes:
        return mistakes
    shards = {parameter: mark.axes for parameter, mark in marks.items() if mark.kind == "shard"}
    extra = _extra_parameters(parameters, getattr(cls, name))
    return Endpoint(name, signature.replace(parameters=[*parameters, *extra]), shards, result, stream)


def _extra_parameters(role: Sequence[inspect.Parameter], override: Callable[..., object]) -> list[inspect.Parameter]:
    known = {parameter.name for parameter in role} | {"self"}
    return [p for p in inspect.signature(override).parameters.values() if p.name not in known]
