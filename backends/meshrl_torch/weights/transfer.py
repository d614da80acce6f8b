"""Weights out of a model and into one, as arrays. bfloat16 is that of `ml_dtypes`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from meshrl.data import Weights
from meshrl.errors import ModelError
from meshrl.mesh import Array

_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)


class Form(NamedTuple):
    """A tensor of a model without its values."""

    dtype: str
    """The name of the dtype in numpy."""
    shape: tuple[int, ...]


def arrays(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Array]]:
    """Yield the memory of tensors, copied if it is on a GPU."""
    return ((name, array_of(tensor.cpu())) for name, tensor in tensors)


def import_weights(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy the weights into a model's tensors.

    ModelError, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    own = {name: array_of(tensor) for name, tensor in tensors.items()}
    check_weights({name: Form(array.dtype.name, array.shape) for name, array in own.items()}, weights)
    for name, array in own.items():
        np.copyto(array, weights.tensors[name])


def check_weights(own: Mapping[str, Form], weights: Weights) -> None:
    """Raise ModelError if the weights are not of a model with these tensors, or differ from the sent bytes."""
    given = {name: Form(array.dtype.name, array.shape) for name, array in weights.tensors.items()}
    check_forms(own, given, weights.version)
    if damaged := [name for bucket in weights.buckets for name in bucket.damaged()]:
        raise ModelError(
            f"weights of version {weights.version} did not arrive as they were sent: {_some('differ', damaged)}. "
            "Publish them again"
        )


def check_forms(own: Mapping[str, Form], given: Mapping[str, Form], version: int) -> None:
    """Raise ModelError if the weights of a version, `given`, are not of a model with the tensors `own`."""
    lacking, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if lacking or strange:
        raise ModelError(
            f"weights of version {version} belong to another model: {_some('missing', lacking)}"
            f"{'; ' if lacking and strange else ''}{_some('unknown here', strange)}. Give the policy and "
            "this role the same `model`"
        )
    for name, form in own.items():
        if given[name] != form:
            raise ModelError(
                f"weight `{name}` of version {version} is {given[name].dtype}{list(given[name].shape)} and the "
                f"model has {form.dtype}{list(form.shape)}: give the policy and this role the same `model` and `dtype`"
            )


def copy_into(tensor: Tensor, array: Array) -> None:
    """Copy an array of the same shape into a tensor, in its dtype and on its device."""
    copied = np.array(array)  # torch accepts no read-only memory
    plain = (
        torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
        if array.dtype == _BFLOAT16
        else torch.from_numpy(copied)
    )
    tensor.copy_(plain)


def array_of(tensor: Tensor) -> Array:
    """Return the tensor's memory as an array."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(_BFLOAT16)
    return plain.numpy()


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
