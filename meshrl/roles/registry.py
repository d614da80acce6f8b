"""Backends by name: installed packages that implement roles register themselves as entry points.

A backend's module has `ROLES`: for each role's name the import path of its class, `package.module:Class`. It may have
these attributes too. All functions are given as import paths:

- `OPTIONS`: the import path of the schema of the backend's options, by role.
- `MODELS`: what its roles do with the model of their table (see `Models`).
- `AXES`: the axes along which the ranks of a role can be arranged, by role.
- `BLIND`: true if its roles take no rows with images.
- `SEES`: a function that raises ModelError if a role takes no images for its table's model.
- `NEEDS`: a function that raises BackendError if a role's table needs a package that is not installed.
- `COUNTS`: a function that counts the tokens of prompts, or of whole rows, with the tokenizer of a table's model alone.
- `TEXTS`: a function that returns one from rows of tokens to the text of each token, with its tokenizer alone.
- `ENDS`: a function that says why completions of a sampler's model may never end, with its tokenizer alone.
- `MEMORY`: a function that estimates the memory of a rank (`meshrl.roles.MemoryEstimate`), from a role's table and the
  model's config.json.
- `FLOPS`: a function that returns the operations of a pass over a row (`meshrl.roles.Flops`), from the same.
- `READS`: a function that says how a table's model reads rows, from its config.json. ModelError if it cannot.
- `MASKS`: how the sampler can constrain what the model writes (see `meshrl.data.Masks`). "trained" of a policy: it
  computes log-probs under such masks. The default is "none".
- `CHAT`: a function that reads the chat format of a table's model (`meshrl.agents`).

The module and the schemas import nothing but meshrl, because they are loaded to read a configuration.

    ROLES = {"Policy": "meshrl_torch.train.fsdp.roles:FsdpPolicy"}
    OPTIONS = {"Policy": "meshrl_torch.options:FsdpConfig"}
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
from meshrl.data import Masks
from meshrl.errors import BackendError, did_you_mean

R = TypeVar("R")

_GROUP: Final = "meshrl.backends"
_REQUIREMENT: Final = re.compile(
    r"""(?P<name>[\w.-]+)(?:\[(?P<others>.*?)\])?.*;.*\bextra == ["'](?P<extra>[\w-]+)["']"""
)
"""A requirement of an extra in a distribution's metadata: `torch>=2.13; extra == 'torch'`."""

Models: TypeAlias = Literal["read", "perhaps", "ignored", "none"]
"""A backend's `MODELS`, which says what its roles do with the model of their table. `read`: all roles read it.
`perhaps` (the default): some may read it. `ignored`: they stand in for roles that read it. `none`: they have no model,
and call a function of the user."""


class BackendOptions(Config):
    """The base of a backend's options, a subtable of a role's table such as `[policy.fsdp]`. Each has a default."""

    @property
    def lends_memory(self) -> str:
        """The key that makes a sampler free its memory while no row is decoded. "" if it is not set."""
        return ""

    @property
    def samples_elsewhere(self) -> bool:
        """True if a sampler's ranks only send requests to servers, so training on the same mesh does not slow it."""
        return False

    @property
    def quantized(self) -> str:
        """The format to which a sampler rounds its matrices, such as "fp8". "" if it has them in its `dtype`."""
        return ""

    @property
    def keeps_weights(self) -> str:
        """The missing key without which a sampler accepts no weights. "" if it accepts them."""
        return ""


def backends() -> Mapping[str, str]:
    """Return each installed backend and its module."""
    return _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, str]:  # noqa: ARG001 -- where `entry_points` looks
    return {entry.name: entry.value for entry in entry_points(group=_GROUP)}


def implementation(role: Callable[..., R], backend: str) -> Callable[[Config], R]:
    """Return a backend's class for a role.

    Raises `BackendError` if the backend is unknown, its packages are missing, or it does not have the role.
    """
    return cast("Callable[[Config], R]", class_for(getattr(role, "__name__", repr(role)), backend))


def class_for(role: str, backend: str) -> object:
    """Return a backend's class for a role, by the role's name."""
    return _attribute(backend, import_path(role, backend))


def import_path(role: str, backend: str) -> str:
    """Return the import path of a backend's class for a role, `package.module:Class`.

    Raises BackendError if the backend is unknown or does not have the role.
    """
    roles = _table(backend, "ROLES")
    if role not in roles:
        own = f". No backend has a {role}: spawn an actor of your own by `(await run.mesh(1)).spawn({role}, ...)`"
        has = f"it has {', '.join(sorted(roles))}{'' if backends_with(role) else own}"
        raise BackendError(f"backend {backend!r} has no {role}: {has}")
    return roles[role]


def backends_with(role: str) -> list[str]:
    """Return the names of installed backends with a role, except those whose packages are missing."""
    names: list[str] = []
    for backend in sorted(backends()):
        with suppress(BackendError):
            names += [backend] if role in _table(backend, "ROLES") else []
    return names


def options_schema(role: str, backend: str) -> type[BackendOptions] | None:
    """Return the schema of a backend's options for a role, None if it has none. BackendError as in `implementation`."""
    path = _table(backend, "OPTIONS").get(role)
    return None if path is None else cast("type[BackendOptions]", _attribute(backend, path))


def models_of(backend: str) -> Models:
    """Return what a backend's roles do with the model of their table. BackendError as in `implementation`."""
    return cast("Models", getattr(_module(backend), "MODELS", "perhaps"))


def masks_of(backend: str) -> Masks:
    """Return how a backend constrains what a model writes. BackendError as in `implementation`."""
    return cast("Masks", getattr(_module(backend), "MASKS", "none"))


def takes_images(backend: str) -> bool:
    """True if a backend's roles take rows with images. BackendError as in `implementation`."""
    return not getattr(_module(backend), "BLIND", False)


def axes_of(role: str, backend: str) -> Sequence[str]:
    """Return the axes along which the ranks of a backend's role can be arranged, the last one fastest.

    Empty if the role takes only one rank. The default is dp. BackendError as in `implementation`.
    """
    return cast("Mapping[str, Sequence[str]]", getattr(_module(backend), "AXES", {})).get(role, ("dp",))


def function_of(
    backend: str, name: Literal["NEEDS", "COUNTS", "TEXTS", "ENDS", "MEMORY", "FLOPS", "CHAT", "READS", "SEES"]
) -> Callable[..., object] | None:
    """Return the function that a backend's attribute names, or None."""
    path = getattr(_module(backend), name, None)
    return None if path is None else cast("Callable[..., object]", _attribute(backend, cast("str", path)))


def packages_of(backend: str) -> frozenset[str]:
    """Return the packages that a backend needs: those of the extra with its name, and its distribution.

    Without such an extra, only the distribution. Empty if the backend is not installed.
    """
    distributions = [entry.dist for entry in entry_points(group=_GROUP, name=backend) if entry.dist]
    return frozenset[str]().union(
        *({each.name, *_packages_of_extra(each.name, each.requires or (), backend)} for each in distributions)
    )


def _packages_of_extra(distribution: str, requires: Sequence[str], extra: str) -> set[str]:
    """Return the packages of an extra, including those of other extras of the same distribution that it requires."""
    packages: set[str] = set()
    for requirement in filter(None, map(_REQUIREMENT.match, requires)):
        if requirement["extra"] != extra:
            continue
        if requirement["name"] != distribution:
            packages.add(requirement["name"])
        else:
            for other in (requirement["others"] or "").split(","):
                packages |= _packages_of_extra(distribution, requires, other.strip())
    return packages


def _table(backend: str, name: str) -> Mapping[str, str]:
    return cast("Mapping[str, str]", getattr(_module(backend), name, {}))


def _module(backend: str) -> ModuleType:
    known = backends()
    if backend not in known:
        installed = f"There are {', '.join(sorted(known))}"
        hint = did_you_mean(backend, known)
        raise BackendError(f"no backend {backend!r} is installed: {f'{hint} {installed}' if hint else installed}")
    with _importing(backend):
        return import_module(known[backend])


def _attribute(backend: str, path: str) -> object:
    module, _, attribute = path.partition(":")
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
    """Return what to install for a backend: the extra with its name, of its distribution."""
    for entry in entry_points(group=_GROUP, name=backend):
        if entry.dist and backend in (entry.dist.metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{entry.dist.name}[{backend}]'"
    return "install it"
