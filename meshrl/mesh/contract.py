"""Contracts: an actor's endpoints, read once from their annotations when it is spawned."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from meshrl.errors import ContractError
from meshrl.mesh.actor import Actor, CollectiveActor, is_endpoint
from meshrl.mesh.sharding import Axes, Mark, holds_mark, read_marks, type_name
from meshrl.user_code import signature_of


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

    def __reduce__(self) -> tuple[type["Endpoint"], tuple[object, ...]]:
        """Leave out types and defaults, which calls do not read and another process may be unable to make."""
        empty = inspect.Parameter.empty
        bare = [
            inspect.Parameter(each.name, each.kind, default=empty if each.default is empty else ...)
            for each in self.signature.parameters.values()
        ]
        mark = Mark(self.result.kind, self.result.axes, None)
        return Endpoint, (self.name, inspect.Signature(bare), dict(self.shards), mark, self.stream)


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
        endpoint = _read_endpoint(cls, owner, name, function, shape)
        if isinstance(endpoint, Endpoint):
            contract[name] = endpoint
        else:
            mistakes += [f"{cls.__name__}.{name}: {mistake}" for mistake in endpoint]
    if mistakes:
        on = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        lines = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise ContractError(f"{cls.__name__} cannot be spawned on a mesh of {on}:\n{lines}")
    return contract


def _declared(cls: type) -> list[tuple[str, type, Callable[..., object]]]:
    """List each endpoint with the class that declared it first, which is the role if there is one."""
    declared: dict[str, tuple[str, type, Callable[..., object]]] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and is_endpoint(value):
                declared.setdefault(name, (name, owner, value))
    return list(declared.values())


def _read_endpoint(
    cls: type, owner: type, name: str, function: Callable[..., object], shape: Mapping[str, int]
) -> Endpoint | list[str]:
    override = inspect.getattr_static(cls, name)
    overrides = override is not function and inspect.isfunction(override)
    try:
        marks, stream = read_marks(function, cls)
        own, _ = read_marks(override, cls) if overrides else ({}, False)
    except NameError as error:
        return [f"the annotation {error.name!r} is not known at run time: import it outside `if TYPE_CHECKING`"]
    signature = signature_of(function)
    parameters = list(signature.parameters.values())[1:]
    result = marks.pop("return", Mark("missing", (), None))
    mistakes = _kind_mistakes(cls, name, stream)
    for parameter, mark in marks.items():
        mistakes += _parameter_mistakes(parameter, mark, shape)
    mistakes += _result_mistakes(result, shape, stream)
    if overrides:
        mistakes += _override_mistakes(owner, signature, {**marks, "return": result}, own, override)
    if mistakes:
        return mistakes
    shards = {parameter: mark.axes for parameter, mark in marks.items() if mark.kind == "shard"}
    extra = _extra_parameters(parameters, getattr(cls, name))
    return Endpoint(name, signature.replace(parameters=[*parameters, *extra]), shards, result, stream)


def _extra_parameters(role: Sequence[inspect.Parameter], override: Callable[..., object]) -> list[inspect.Parameter]:
    known = {parameter.name for parameter in role} | {"self"}
    return [p for p in signature_of(override).parameters.values() if p.name not in known]


def check_may_shrink(cls: type, shape: Mapping[str, int], min_ranks: int) -> None:
    """Raise ContractError if the mesh may lose ranks and the actor needs all of them."""
    if min_ranks and (issubclass(cls, CollectiveActor) or shape.get("dp") != prod(shape.values())):
        written = ", ".join(f"{axis}={size}" for axis, size in shape.items())
        raise ContractError(
            f"{cls.__name__} cannot be spawned on a mesh of {written} whose ranks may come and go "
            f"(min_ranks = {min_ranks}): such a mesh needs the axis dp only, and an actor whose ranks work apart"
        )


def _kind_mistakes(cls: type, name: str, stream: bool) -> list[str]:
    """Mistakes of the method itself: it is not async, or is annotated as a generator but is not one."""
    function = inspect.getattr_static(cls, name)
    if not inspect.isfunction(function):
        return [f"is an endpoint of a base class, overridden by {type_name(type(function))}: write a method"]
    generator, coroutine = inspect.isasyncgenfunction(function), inspect.iscoroutinefunction(function)
    abstract = getattr(function, "__isabstractmethod__", False)
    if stream and not generator and not abstract:
        return ["says it returns an AsyncIterator but is not an async generator: write `async def` with `yield`"]
    if not stream and generator:
        return ["yields: write `-> AsyncIterator[Gather[...]]`"]
    if not stream and not coroutine:
        return [f"is not async: write `async def {name}`"]
    return []


def _parameter_mistakes(parameter: str, mark: Mark, shape: Mapping[str, int]) -> list[str]:
    """Mistakes of the mark on one parameter."""
    where = f"parameter `{parameter}`"
    if mark.kind == "plain" and holds_mark(mark.type):
        return [f"{where}: a mark stands inside {type_name(mark.type)}: write it outermost, as in Shard[list[Batch]]"]
    if mark.kind in ("gather", "mean", "sum", "same"):
        return [f"{where} is marked {mark}, which joins results: write Shard or Replicate"]
    mistakes = _axis_mistakes(where, mark, shape)
    if mark.kind == "shard" and not _leaves_have(mark.type, "parts"):
        name = type_name(mark.type)
        text = "cannot be split over ranks: shard a Batch, an array, or a dict or list of them; or write Replicate"
        mistakes.append(f"{where}: {name} {text}[{name}]")
    return mistakes


def _result_mistakes(mark: Mark, shape: Mapping[str, int], stream: bool) -> list[str]:
    """Mistakes of the mark on the result."""
    if mark.kind == "missing":
        return ["has no result annotation: write `-> None`, `-> Gather[...]`, `-> Mean[...]` or `-> Same[...]`"]
    if mark.kind in ("shard", "replicate"):
        return [f"the result is marked {mark}, which splits arguments: write Gather, Mean, Sum or Same"]
    if stream and mark.kind not in ("plain", "gather"):
        return [f"a stream cannot yield {mark}: its values are handed on one by one; write AsyncIterator[Gather[...]]"]
    if mark.kind == "plain" and holds_mark(mark.type):
        return [f"the result: a mark stands inside {type_name(mark.type)}: write it outermost, as in Gather[...]"]
    several = prod(shape.values()) > 1
    if mark.kind == "plain":
        if mark.type is type(None) or mark.type is None or not several:
            return []
        name = type_name(mark.type)
        marks = [f"Same[{name}] if all ranks return the same"]
        marks += [f"Gather[{name}] to join"] if _leaves_have(mark.type, "join") else []
        marks += [f"Mean[{name}] or Sum[{name}] to reduce"] if _leaves_have(mark.type, "mean") else []
        return [f"the result {name} of {prod(shape.values())} ranks is not marked: write {', '.join(marks)}"]
    mistakes = _axis_mistakes("the result", mark, shape)
    needed = {"gather": "join", "mean": "mean", "sum": "__add__"}.get(mark.kind)
    if needed and not _leaves_have(mark.type, needed):
        mistakes.append(f"the result {mark}: {type_name(mark.type)} has no `{needed}`; write Same, or gather a Batch")
    return mistakes


def _axis_mistakes(where: str, mark: Mark, shape: Mapping[str, int]) -> list[str]:
    lacking = [axis for axis in mark.axes if axis not in shape and axis != "*"]
    if not lacking:
        return []
    written = ", ".join([f"{axis}=1" for axis in lacking] + [f"{axis}={size}" for axis, size in shape.items()])
    return [
        (
            f"{where} is marked {mark} but the mesh has no axis {' or '.join(map(repr, lacking))} "
            f"(it has {', '.join(shape)}): write mesh.shape({written})"
        )
    ]


def _override_mistakes(
    owner: type,
    base: inspect.Signature,
    marks: Mapping[str, Mark],
    own: Mapping[str, Mark],
    override: Callable[..., object],
) -> list[str]:
    """Mistakes of an override against its role. Plain types inherit the role's marks."""
    mistakes = []
    for name, mark in own.items():
        inherited = marks.get(name)
        differs = inherited is not None and (mark.kind, mark.axes) != (inherited.kind, inherited.axes)
        if differs and mark.kind != "plain":
            what = "the result" if name == "return" else f"parameter `{name}`"
            mistakes.append(
                f"{what} is {mark} here but {inherited} in {owner.__name__}: the contract stands once, "
                f"on {owner.__name__}; write the plain type here"
            )
    parameters = list(signature_of(override).parameters.values())[1:]
    role = list(base.parameters.values())[1:]
    if [(p.name, p.kind) for p in parameters[: len(role)]] != [(p.name, p.kind) for p in role]:
        text = f"do not start with {_names(role)}, those of {owner.__name__}: write these first, in this order"
        mistakes.append(f"its parameters {_names(parameters)} {text}")
    elif needless := [p.name for p in parameters[len(role) :] if p.default is p.empty and p.kind.value not in (2, 4)]:
        mistakes.append(f"its parameter `{needless[0]}` is not in {owner.__name__}: give it a default")
    return mistakes


def _names(parameters: Sequence[inspect.Parameter]) -> str:
    return "(" + ", ".join(parameter.name for parameter in parameters) + ")"


def _leaves_have(hint: object, attribute: str) -> bool:
    """True if every leaf type, inside containers and optionals, can be split or joined."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return True
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return all(_leaves_have(option, attribute) for option in arguments)
    container = origin if isinstance(origin, type) else None
    if container is not None and issubclass(container, Mapping) and len(arguments) == 2:
        return _leaves_have(arguments[1], attribute)
    if container is not None and issubclass(container, Sequence | tuple):
        return all(_leaves_have(option, attribute) for option in arguments if option is not Ellipsis)
    leaf = container or hint
    if not isinstance(leaf, type):
        return True
    if attribute in ("mean", "__add__") and issubclass(leaf, int | float):
        return True
    member = getattr(leaf, attribute, None)
    joins = inspect.ismethod(member) if attribute in ("join", "mean") else member is not None
    return joins or issubclass(leaf, np.ndarray)
