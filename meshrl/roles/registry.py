"""Backends by name: installed packages that implement roles announce themselves as entry points.

A backend's module has `ROLES`, from a role's name to where its class is. It may have `OPTIONS`, from a role's name to
where the schema of the backend's own options is, `MODELS`, `NEEDS`, where a function is that raises
BackendError where a role's table asks for what is not installed, `COUNTS`, where one is that tells the tokens of
prompts by a model's table and its tokenizer alone, `MEMORY`, where one is that tells what a rank holds of a role, by
its table and the model's config.json (`meshrl.roles.memory`), `CHAT`, where one is that reads how a table's model
converses (`meshrl.agents`), and `AXES`, from a role's name to the axes that its ranks may stand along. Neither the
module nor the schemas import more than meshrl: they are loaded to read a configuration.

    ROLES = {"Policy": "meshrl_fsdp.policy:FsdpPolicy"}
    OPTIONS = {"Policy": "meshrl_fsdp.options:FsdpConfig"}
"""

import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Final, Literal, TypeAlias, TypeVar, cast

from meshrl.config import Config
from meshrl.errors import BackendError, did_you_mean

R = TypeVar("R")

GROUP = "meshrl.backends"
_REQUIREMENT: Final = re.compile(
    r"""(?P<name>[\w.-]+)(?:\[(?P<others>.*?)\])?.*;.*\bextra == ["'](?P<extra>[\w-]+)["']"""
)
"""What a distribution asks for in an extra, as its metadata has it: `torch>=2.13; extra == 'torch'`."""

Models: TypeAlias = Literal["read", "perhaps", "ignored", "none"]
"""A backend's `MODELS`: all its roles read the model that their table names; or some may, which is meant where it says
nothing; or they stand for roles that do, and read none; or they hold no model, and call a function of the user's."""


class BackendOptions(Config):
    """The base of a backend's own options: the table of its name in a role's, `[policy.fsdp]`. Each has a default."""

    @property
    def lends_memory(self) -> str:
        """The key that gives a sampler's memory to what trains, whenever no row is decoded; "" where none does."""
        return ""

    @property
    def keeps_weights(self) -> str:
        """The key without which a sampler takes no weights of a policy; "" where it takes them."""
        return ""


def backends() -> Mapping[str, str]:
    """Each installed backend and its module."""
    return _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, str]:  # noqa: ARG001 -- where `entry_points` looks
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def implementation(role: Callable[..., R], backend: str) -> Callable[[Config], R]:
    """The class that a backend has for a role.

    Raises `BackendError` for an unknown backend, one whose packages are missing, or one without the role.
    """
    return cast("Callable[[Config], R]", class_for(getattr(role, "__name__", repr(role)), backend))


def class_for(role: str, backend: str) -> object:
    """The same for a role's name."""
    return _loaded(backend, place_of(role, backend))


def place_of(role: str, backend: str) -> str:
    """Where the class is that a backend has for a role, `package.module:Class`; it is not imported.

    BackendError as of the class, but for packages that it needs.
    """
    roles = _table(backend, "ROLES")
    if role not in roles:
        raise BackendError(f"backend {backend!r} has no {role}: it has {', '.join(sorted(roles))}")
    return roles[role]


def backends_with(role: str) -> list[str]:
    """The installed backends that have a role, by name; not those whose packages are missing."""
    found: list[str] = []
    for backend in sorted(backends()):
        with suppress(BackendError):
            found += [backend] if role in _table(backend, "ROLES") else []
    return found


def options_schema(role: str, backend: str) -> type[BackendOptions] | None:
    """The schema of a backend's own options for a role; None where it has none. BackendError as of its class."""
    place = _table(backend, "OPTIONS").get(role)
    return None if place is None else cast("type[BackendOptions]", _loaded(backend, place))


def models_of(backend: str) -> Models:
    """What a backend's roles do with the model of their table. BackendError as of its classes."""
    return cast("Models", getattr(_module(backend), "MODELS", "perhaps"))


def axes_of(role: str, backend: str) -> Sequence[str]:
    """The axes that ranks of a backend's role may stand along, the last one fastest; none where it takes one rank.

    A backend that says nothing has dp alone. BackendError as of its classes.
    """
    told = cast("Mapping[str, Sequence[str]]", getattr(_module(backend), "AXES", {}))
    return told.get(role, ("dp",))


def function_of(backend: str, name: Literal["NEEDS", "COUNTS", "MEMORY", "CHAT"]) -> Callable[..., object] | None:
    """The function that a backend's attribute names; None where it has none."""
    place = getattr(_module(backend), name, None)
    return None if place is None else cast("Callable[..., object]", _loaded(backend, cast("str", place)))


def packages_of(backend: str) -> frozenset[str]:
    """The packages that a backend needs: what the extra of its name asks for, and the distribution that has it.

    Without an extra the distribution alone; none for a backend that is not installed.
    """
    found: set[str] = set()
    for entry in entry_points(group=GROUP, name=backend):
        if entry.dist:
            found |= {entry.dist.name, *_asked_for(entry.dist.name, entry.dist.requires or (), backend)}
    return frozenset(found)


def _asked_for(name: str, requires: Sequence[str], extra: str) -> set[str]:
    """The packages of an extra, with those of other extras of the same distribution that it asks for."""
    found: set[str] = set()
    for requirement in requires:
        read = _REQUIREMENT.match(requirement)
        if read is None or read["extra"] != extra:
            continue
        if read["name"] != name:
            found.add(read["name"])
        for other in (read["others"] or "").split(",") if read["name"] == name else ():
            found |= _asked_for(name, requires, other.strip())
    return found


def _table(backend: str, name: str) -> Mapping[str, str]:
    return cast("Mapping[str, str]", getattr(_module(backend), name, {}))


def _module(backend: str) -> ModuleType:
    known = backends()
    if backend not in known:
        hint = did_you_mean(backend, known)
        there = f"There are {', '.join(sorted(known))}"
        raise BackendError(f"no backend {backend!r} is installed: {f'{hint} {there}' if hint else there}")
    with _importing(backend):
        return import_module(known[backend])


def _loaded(backend: str, place: str) -> object:
    module, _, attribute = place.partition(":")
    with _importing(backend):
        return cast("object", getattr(import_module(module), attribute))


@contextmanager
def _importing(backend: str) -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise BackendError(
            f"backend {backend!r} needs the package {error.name!r}, which is not installed: {_remedy(backend)}"
        ) from error


def _remedy(backend: str) -> str:
    """What installs a backend's packages: an extra of its name, of the distribution that it comes with."""
    for entry in entry_points(group=GROUP, name=backend):
        if entry.dist and backend in (entry.dist.metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{entry.dist.name}[{backend}]'"
    return "install it"
