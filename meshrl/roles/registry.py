"""Backends by name: installed packages that implement roles announce themselves as entry points.

A backend's module has `ROLES`, from a role's name to where its class is:

    ROLES = {"Policy": "meshrl_torch.policy:TorchPolicy"}
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar, cast

from meshrl.errors import BackendError, did_you_mean
from meshrl.roles.config import RoleConfig

R = TypeVar("R")

GROUP = "meshrl.backends"


def backends() -> Mapping[str, str]:
    """Each installed backend and its module."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def implementation(role: Callable[..., R], backend: str) -> Callable[[RoleConfig], R]:
    """The class that a backend has for a role.

    Raises `BackendError` for an unknown backend, one whose packages are missing, or one without the role.
    """
    name = getattr(role, "__name__", repr(role))
    known = backends()
    if backend not in known:
        hint = did_you_mean(backend, known)
        there = f"There are {', '.join(sorted(known))}"
        raise BackendError(f"no backend {backend!r} is installed: {f'{hint} {there}' if hint else there}")
    try:
        roles: Mapping[str, str] = import_module(known[backend]).ROLES
        if name not in roles:
            raise BackendError(f"backend {backend!r} has no {name}: it has {', '.join(sorted(roles))}")
        module, _, attribute = roles[name].partition(":")
        cls = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"backend {backend!r} needs the package {error.name!r}, which is not installed: install it; for meshrl's "
            "own backends it is in the extra of the backend's name, as in meshrl[torch]"
        ) from error
    return cast("Callable[[RoleConfig], R]", cls)
