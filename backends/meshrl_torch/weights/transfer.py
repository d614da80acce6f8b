"""Weights out of a model and into one, as arrays, and a probe that proves that they are where the model reads them.

Fingerprints prove that the bytes arrived. A probe proves more: policy and sampler compute log-probs of the same tokens.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.data import ADAPTER, Batch, Probe, Ragged, Source, Weights
from meshrl.errors import ModelError
from meshrl.mesh import Array
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.scoring import Passes, PredictAll, logprobs

_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
"""The dtype of bfloat16 in arrays."""
_ROWS: Final = 4
"""Rows of a probe, without the one that is longer than the model's native length."""
_TOKENS: Final = 16
"""Most tokens of each."""
_FEWEST: Final = 2
"""Fewest tokens of a row, because nothing predicts the first."""
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-3, "bfloat16": 0.25, "fp8": 0.5}
"""Largest mean difference of policy and sampler, by the sampler's dtype, or the format of its matrices."""


class TensorSpec(NamedTuple):
    """A tensor of a model without its values."""

    dtype: str
    """The name of the dtype in numpy."""
    shape: tuple[int, ...]


def specs_of(arrays: Mapping[str, Array]) -> Mapping[str, TensorSpec]:
    """Return the specs of arrays, by name."""
    return {name: TensorSpec(array.dtype.name, array.shape) for name, array in arrays.items()}


def arrays(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Array]]:
    """Yield the memory of tensors, copied if it is on a GPU: to pinned memory, while the next tensor is made."""
    copies = deque[tuple[str, Tensor, torch.cuda.Event]]()
    for name, tensor in tensors:
        if not tensor.is_cuda:
            yield name, array_of(tensor)
            continue
        copy, done = torch.empty_like(tensor, device="cpu", pin_memory=True), torch.cuda.Event()
        copy.copy_(tensor, non_blocking=True)
        done.record(torch.cuda.current_stream(tensor.device))
        copies.append((name, copy, done))
        if len(copies) > 1:
            yield _copied(*copies.popleft())
    while copies:
        yield _copied(*copies.popleft())


def _copied(name: str, copy: Tensor, done: torch.cuda.Event) -> tuple[str, Array]:
    done.synchronize()
    return name, array_of(copy)


def import_weights(tensors: Mapping[str, Tensor], weights: Weights) -> None:
    """Copy the weights into a model's tensors.

    ModelError, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    own = {name: array_of(tensor) for name, tensor in tensors.items()}
    check_weights(specs_of(own), weights)
    for name, array in own.items():
        np.copyto(array, weights.tensors[name])


def check_weights(own: Mapping[str, TensorSpec], weights: Weights) -> None:
    """Raise ModelError if the weights are not of a model with these tensors, or differ from the sent bytes."""
    check_specs(own, specs_of(weights.tensors), weights.version)
    if damaged := [name for bucket in weights.buckets for name in bucket.damaged()]:
        raise ModelError(
            f"weights of version {weights.version} did not arrive as they were sent: {_listed('differ', damaged)}. "
            "Publish them again"
        )


def check_specs(own: Mapping[str, TensorSpec], given: Mapping[str, TensorSpec], version: int) -> None:
    """Raise ModelError if the weights of a version, `given`, are not of a model with the tensors `own`."""
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown:
        raise ModelError(
            f"weights of version {version} belong to another model: {_listed('missing', missing)}"
            f"{'; ' if missing and unknown else ''}{_listed('unknown here', unknown)}. Give the policy and "
            "this role the same `model`"
        )
    for name, spec in own.items():
        if given[name] != spec:
            raise ModelError(
                f"weight `{name}` of version {version} is {given[name].dtype}{list(given[name].shape)} and the "
                f"model has {spec.dtype}{list(spec.shape)}: give the policy and this role the same `model` and `dtype`"
            )


def copy_into(tensor: Tensor, array: Array) -> None:
    """Copy an array of the same shape into a tensor, in its dtype and on its device."""
    copied = np.array(array)  # torch accepts no read-only memory
    if array.dtype == _BFLOAT16:
        tensor.copy_(torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16))
    else:
        tensor.copy_(torch.from_numpy(copied))


def array_of(tensor: Tensor) -> Array:
    """Return the tensor's memory as an array."""
    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(_BFLOAT16)
    return plain.numpy()


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def make_probe(passes: Passes, version: int, adapter: str | None = None) -> Probe | None:
    """Compute log-probs of tokens that depend only on the version, under an adapter or the default one.

    All ranks call it together. None if the model's longest row is too short to predict anything.
    """
    model = passes.model
    length = min(_TOKENS, model.max_tokens - 1, model.native_tokens)
    if length < _FEWEST:
        return None
    random, lengths = np.random.default_rng(version), [length] * _ROWS
    if model.native_tokens < model.max_tokens - 1:
        lengths.append(min(model.native_tokens + _TOKENS, model.max_tokens - 1))
    drawn = [random.integers(0, model.known, each, np.int32) for each in lengths]
    if model.vision is not None:  # which would stand for an image
        drawn = [np.where(each == model.vision.token, (model.vision.token + 1) % 2, each) for each in drawn]
    tokens = Ragged.of(drawn, np.int32)
    return Probe(tokens, _logprobs(passes, tokens, adapter))


def probe_difference(model: LanguageModel, predict: PredictAll, probe: Probe, adapter: str | None = None) -> float:
    """Return the mean absolute difference of a model's log-probs, under an adapter by name, from a probe."""
    size = probe.tokens.values.size
    return mean_difference(probe, _logprobs(Passes(model, predict, size, split=model.split), probe.tokens, adapter))


def mean_difference(probe: Probe, logprobs: NDArray[np.float32]) -> float:
    """Return the mean absolute difference of log-probs from a probe, of the rows of the length where it is highest."""
    gaps, lengths = np.abs(probe.logprobs - logprobs), np.repeat(probe.tokens.lengths, probe.tokens.lengths - 1)
    return max(float(gaps[lengths == length].mean()) for length in np.unique(lengths))


def check_probe(weights: Weights, difference: float, dtype: str) -> None:
    """Raise ModelError if a sampler with new weights computes something else than the policy that made them."""
    if weights.probe is not None and not np.isfinite(weights.probe.logprobs).all():
        raise ModelError(
            f"the weights of version {weights.version} give log-probs that are not finite in the policy itself: "
            "training has broken the model. Resume from a checkpoint, with a lower policy.optimizer.lr"
        )
    if not difference <= TOLERANCE[dtype]:
        raise ModelError(
            f"the weights of version {weights.version} arrived, and yet the sampler's log-probs are {difference:.3g} "
            f"from the policy's on average, on tokens given to both (at most {TOLERANCE[dtype]:g} in {dtype}): this "
            "model's weights do not reach all of the sampler's layers, and its completions cannot be trusted. Use "
            "another sampler.backend"
        )


def _logprobs(passes: Passes, tokens: Ragged, adapter: str | None) -> NDArray[np.float32]:
    batch = Batch.of(tokens=tokens)
    if adapter is not None:
        batch = batch.assign(**{ADAPTER: [adapter] * len(tokens)})
    values = logprobs(passes, batch, Source("sampler")).values
    return np.delete(values, tokens.offsets[:-1]).astype(np.float32)
