"""Load a policy's weights into an engine's model, from shared memory or a broadcast, under the names of its loader.

A policy's tensors are named as in transformers. Those in files and engines differ for a mixture of experts: a policy
has one tensor for all experts of a layer.
"""

import json
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from xxhash import xxh3_64_intdigest

from meshrl_inference.engine_side.protocol import AdapterOf, Load, Outcome, SharedBucket, SharedTensor
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_bytes import dtype_of, place_in
from meshrl_torch.wire.generator import generator_of
from meshrl_torch.wire.manifest import Manifest, Part
from meshrl_torch.wire.plan import ConflictError
from meshrl_torch.wire.reader import Damaged, Lost, Reader
from meshrl_torch.wire.wide import is_wide

_LAYER: Final = re.compile(r".*?\.\d+\.")
_MATRIX: Final = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
"""Matches the names of an adapter's matrices: of a layer, its A or B."""

Specs: TypeAlias = Mapping[str, tuple[str, list[int]]]
"""Dtype and shape of each tensor of a model, by its name in transformers."""
LoadTensors: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]
"""The engine's loader of tensors by their names in files. It may keep them for a while."""

_reader: Final = Reader()
_threads: Final = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "meshrl-fingerprint")
"""One thread does not use the memory's whole bandwidth."""
_maps: Final[dict[int, tuple[int, mmap.mmap]]] = {}
"""Open files and their memory, by inode number, which is unique while the file exists.

Kept, because mapping pages takes longer than reading them."""
_lock: Final = Lock()


class Naming:
    """The tensors of a folder's model in transformers, and their names in files."""

    def __init__(self, folder: str) -> None:
        shape = AutoConfig.from_pretrained(folder)
        kind: Any = generator_of(shape)
        with torch.device("meta"):
            self._network: Any = kind.from_config(shape)
        self.differs: Final = bool(get_model_conversion_mapping(self._network, add_legacy=False))
        """True if files store them differently."""

    def specs(self, dtype: str) -> dict[str, tuple[str, list[int]]]:
        """Return dtype and shape of each tensor, by its name in a policy. Tied ones occur once."""
        return {
            name: ("float32" if is_wide(self._network, name) else dtype, list(tensor.shape))
            for name, tensor in self._tensors()
        }

    def file_shapes(self) -> dict[str, list[int]]:
        """Return the shape of each tensor in the files of a whole model, by its name there."""
        return {name: list(tensor.shape) for name, tensor in self.in_files(self._tensors())}

    def tied(self) -> dict[str, list[str]]:
        """Return further names of tensors, by the name in a policy."""
        return {first: others for (first, *others), _ in self._distinct() if others}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors without values. Tied ones occur once."""
        return ((names[0], tensor) for names, tensor in self._distinct())

    def _distinct(self) -> Iterable[tuple[list[str], Tensor]]:
        """Return the tensors without values, each with all of its names."""
        named: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in self._network.state_dict(keep_vars=True).items():
            named.setdefault(id(tensor), ([], tensor))[0].append(name)
        return named.values()

    @property
    def linear(self) -> Mapping[str, tuple[int, int]]:
        """Sizes of the output and the input of each linear layer but the head, by name."""
        head = self._network.get_output_embeddings()
        layers = [(name, each) for name, each in self._network.named_modules() if isinstance(each, Linear)]
        return {name: (each.out_features, each.in_features) for name, each in layers if each is not head}

    @property
    def linear_names(self) -> set[str]:
        """The last parts of their names, such as `q_proj`."""
        return {name.rpartition(".")[2] for name in self.linear}

    @property
    def matrices(self) -> frozenset[str]:
        """The names of matrices that can be in FP8."""
        return fp8.matrices(self._network)

    @property
    def fp8_refusal(self) -> str:
        """Why the model cannot be in FP8. Empty if it can."""
        return fp8.refusal(self._network)

    def unit(self, name: str) -> str:
        """Return a label that a policy's tensor shares with those that are converted and loaded together: a layer's."""
        layer = _LAYER.match(name)
        return layer.group() if layer else "" if self.differs else name

    def in_files(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert a policy's tensors to those in files. Copies at most the tensors of one layer at a time."""
        if not self.differs:
            yield from tensors
            return
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            layers.setdefault(self.unit(name), {})[name] = tensor
        for layer in layers.values():
            yield from revert_weight_conversion(self._network, layer).items()


class LayerAssembly:
    """Tensors that are loaded as soon as all of their layer are whole: a `Destination`."""

    def __init__(
        self, manifest: Manifest, naming: Naming, device: torch.device, begin: Callable[[], object], load: LoadTensors
    ) -> None:
        """`device`: of the model. `begin`: called before the first tensor of each attempt."""
        self.device: Final = device
        self.begun = False
        """True if some of the model's tensors may be new."""
        self._manifest, self._naming, self._begin, self._load = manifest, naming, begin, load
        self._missing: dict[str, int] = {}
        """Number of missing elements, by unit."""
        self._incomplete: dict[str, dict[str, Tensor]] = {}
        """Tensors that are not all whole, by unit and name."""

    def begin(self) -> None:
        """Forget all parts, and prepare for others."""
        self._missing.clear()
        self._incomplete.clear()
        for name, shape in self._manifest.sent.items():
            unit = self._naming.unit(name)
            self._missing[unit] = self._missing.get(unit, 0) + prod(shape)
        self.begun = True
        self._begin()

    def place(self, part: Part) -> Tensor:
        """Return a view of a part in its tensor, which is made for the first one."""
        unit = self._incomplete.setdefault(self._naming.unit(part.name), {})
        if part.name not in unit:
            unit[part.name] = torch.empty(part.size, dtype=dtype_of(part), device=self.device)
        return place_in(unit[part.name], part)

    def arrived(self, part: Part) -> None:
        """Load a unit that is whole."""
        unit = self._naming.unit(part.name)
        self._missing[unit] -= prod(part.shape)
        if not self._missing[unit]:
            self._load(self._naming.in_files(self._incomplete.pop(unit).items()))


def read_broadcast(
    manifest: Manifest, together: int, naming: Naming, device: torch.device, begin: Callable[[], object],
    load: LoadTensors,
) -> Outcome:  # fmt: skip
    """Read a broadcast into an engine's model, like all of the `together` processes that read it at once."""
    assembly = LayerAssembly(manifest, naming, device, begin, load)

    def warn(attempt: int, error: str) -> None:
        sys.stderr.write(f"weights arrived incomplete, attempt {attempt}: {error}\n")

    try:
        return Outcome(_reader.read(manifest, together, assembly, warn), begun=True)
    except Lost as lost:
        return Outcome("", assembly.begun, lost.reason, lost.where)
    except ConflictError as conflict:
        return Outcome("", assembly.begun, str(conflict))
    except Damaged as damaged:
        return Outcome("", assembly.begun, f"{damaged}. Publish them again")


def mapped(path: str) -> mmap.mmap:
    """Map a file that its writer uses again and again, for readers that require writable memory.

    Do not write to it: a written page would hide later changes of its writer. Kept until another one is requested after
    its writer has removed it.
    """
    with _lock, Path(path).open("rb") as file:
        number = os.fstat(file.fileno()).st_ino
        if number not in _maps:
            for other, (opened, _) in list(_maps.items()):
                if not os.fstat(opened).st_nlink:  # its writer has removed it
                    os.close(opened)
                    del _maps[other]
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            _maps[number] = os.dup(file.fileno()), memory
        return _maps[number][1]


def shared_tensors(buckets: Sequence[SharedBucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its name, in the memory that it arrived in. Do not write to it."""
    for bucket in buckets:
        whole = torch.frombuffer(mapped(bucket.path), dtype=torch.uint8)
        for each in bucket.tensors:
            dtype: torch.dtype = getattr(torch, each.dtype)
            yield each.name, whole[each.start : each.start + _nbytes(each)].view(dtype).reshape(each.shape)


def refusal(specs: Specs, load: Load) -> str | None:
    """Return why these are not the weights of a model with these tensors as they were sent, or None."""
    given = load.specs
    for name in sorted(specs.keys() | given.keys()):
        if given.get(name) != specs.get(name):
            return (
                f"`{name}` is {_described(given.get(name))} there and {_described(specs.get(name))} in the model. Give "
                "the policy and the sampler the same `model` and `dtype`"
            )
    return _damage(load)


def adapter_refusal(layers: Mapping[str, tuple[int, int]], dtype: str, load: Load) -> str | None:
    """Return why these are not the weights of an adapter on these layers as they were sent, or None.

    `layers`: sizes of the output and the input, by name.
    """
    rank, given = load.adapter.rank if load.adapter else 0, load.specs
    for name, spec in sorted(given.items()):
        matrix = _MATRIX.fullmatch(name)
        if matrix is None or matrix[1] not in layers:
            return f"`{name}` is no matrix of a linear layer, and engines adapt these alone, and not the head"
        (rows, columns), letter = layers[matrix[1]], matrix[2]
        wanted = (dtype, [rank, columns] if letter == "A" else [rows, rank])
        if spec != wanted:
            return f"`{name}` is {_described(spec)} there and {_described(wanted)} for this model: give both the same"
        if (other := f"{matrix[1]}.lora_{'AB'.replace(letter, '')}.default.weight") not in given:
            return f"`{other}` is missing"
    return _damage(load)


def write_adapter(folder: Path, load: Load, of: AdapterOf) -> None:
    """Write an adapter as peft does, for engines that read its folders."""
    folder.mkdir()
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in shared_tensors(load.buckets)
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in load.specs})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "target_modules": targets,
        "r": of.rank, "lora_alpha": of.alpha,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")


def _damage(load: Load) -> str | None:
    damaged = [name for bucket in load.buckets for name in _damaged(bucket)]
    if damaged:
        return f"{len(damaged)} tensors did not arrive as they were sent: {', '.join(damaged[:3])}. Publish them again"
    return None


def _damaged(bucket: SharedBucket) -> list[str]:
    memory = mapped(bucket.path)
    fingerprints = _threads.map(lambda each: _fingerprint(memory, each), bucket.tensors)
    return [each.name for each, now in zip(bucket.tensors, fingerprints, strict=True) if now != each.fingerprint]


def _fingerprint(memory: mmap.mmap, tensor: SharedTensor) -> int:
    with memoryview(memory) as view, view[tensor.start : tensor.start + _nbytes(tensor)] as content:
        return xxh3_64_intdigest(content)


def _nbytes(tensor: SharedTensor) -> int:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return prod(tensor.shape) * dtype.itemsize


def _described(spec: tuple[str, list[int]] | None) -> str:
    return "missing" if spec is None else f"{spec[0]}{spec[1]}"
