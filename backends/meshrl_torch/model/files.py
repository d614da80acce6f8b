"""The tensors of a Hugging Face folder: their files, and matrices in FP8, which are multiplied with their scales.

Those in MXFP4, as gpt-oss is published, are read by transformers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshrl.errors import ModelError
from meshrl_torch.checkpoint.boxes import Box, Boxes

_WEIGHTS: Final = "model.safetensors"
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})
_FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
_COUNTS: Final = frozenset({"I64", "I32", "I16", "U8", "BOOL"})
"""Dtypes of masks and positions, which no parameter takes."""
_EXPONENTS: Final = frozenset({"F8_E8M0", "U8"})
"""Dtypes of scales that are powers of two, whose exponents alone are written, as in MXFP8."""
_GROUP: Final = 32
"""Numbers of a row that share a scale in MXFP8, whatever the configuration says."""
_METHODS: Final = ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
"""Values of `quant_method` for which a matrix is its numbers times its scales."""
_PACKED: Final = "mxfp4"
"""The `quant_method` whose numbers transformers unpacks."""
_SCALES: Final = ("_scale_inv", "_scale")
"""What follows a matrix's name in that of its scales."""
_OF_ACTIVATIONS: Final = re.compile(r"\.(activation|input|output|q|k|v|kv|prob)_scale(_ub)?$")
"""Names of scales of what a matrix is multiplied with, and of cached keys and values: these are not rounded here."""
_IN_PARTS: Final = re.compile(r"weight(_packed|_shape|_zero_point|_g_idx)?$")
"""Names of what is no mask and no position: a weight, or a part of one whose numbers are packed, as in 4 bits."""
_REMEDY: Final = "Convert the folder to float32 or bfloat16 with the library that made it"


class ModelFiles:
    """A folder's tensors, as numbers in a plain dtype."""

    def __init__(self, folder: Path, shape: PretrainedConfig) -> None:
        """Take the quantization out of the configuration `shape`. ModelError for numbers whose meaning is not known.

        Scales are those of a whole matrix, of each row, of blocks of `weight_block_size`, or of MXFP8. Raises what
        `Boxes` does.
        """
        self._folder = folder
        self._method = _pop_quantization(shape)
        self.is_packed: Final = self._method is not None and self._method.get("quant_method") == _PACKED
        """True if only transformers knows the numbers."""
        self._boxes: Final = Boxes(folder, _files(folder))
        self._scales: Final = {
            name: name + end
            for name, form in self._boxes.forms.items()
            for end in _SCALES
            if form in _FP8 and self._boxes.forms.get(name + end) in {*_PLAIN, *_EXPONENTS}
        }
        used = {*self._scales.values()}
        if self._scales or self._method:
            used.update(filter(_OF_ACTIVATIONS.search, self._boxes.forms))
        self.shapes: Final = {name: size for name, size in self._boxes.sizes.items() if name not in used}
        """The size of each tensor, without scales."""
        self._check()
        self._blocks = {name: self._block(name) for name in self._scales}

    @property
    def is_scaled(self) -> bool:
        """True if the files have scales."""
        return len(self.shapes) < len(self._boxes.sizes)

    def named_alike(self, network: PreTrainedModel) -> bool:
        """True if the files have each parameter of a network under its name and in its shape, and nothing else."""
        own = {name: tuple(each.shape) for name, each in network.named_parameters()}
        saved = network.state_dict().keys()
        buffers = {name for name, _ in network.named_buffers() if name in saved}
        unused = cast("Iterable[str]", getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ())
        ignored = re.compile("|".join([*unused, r"rotary_emb\.inv_freq"]))
        return not buffers and own == {
            name: size for name, size in self.shapes.items() if name in own or not ignored.search(name)
        }

    def read(self, boxes: Iterable[Box]) -> None:
        """Fill each box's tensor, in its dtype. ModelError as `Boxes.read`."""
        boxes = list(boxes)
        self._boxes.read(boxes)
        for box in boxes:
            if box.name in self._scales:
                numbers = box.tensor.detach()
                numbers.copy_(numbers.float() * self._factors(box))

    def whole(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor."""
        tensor = torch.empty(self.shapes[name], dtype=dtype)
        self.read([Box(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)])
        return tensor

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all tensors by name, those with scales in `dtype`, others mapped as they are."""
        mapped = {name: each for file in self._boxes.files for name, each in load_file(file).items()}
        return {name: self.whole(name, dtype) if name in self._scales else mapped[name] for name in self.shapes}

    def _check(self) -> None:
        """Raise ModelError if a tensor is there twice, or in a dtype that says nothing of its value."""
        for name, form in sorted(self._boxes.forms.items()):
            where = f"{self._boxes.where[name]} has `{name}`"
            if not self._boxes.is_whole(name):
                raise ModelError(f"{where}, and another file has it too: remove what is not of this model")
            if name not in self.shapes or form in _PLAIN or (form in _COUNTS and not _IN_PARTS.search(name)):
                continue
            if form not in _FP8:
                raise ModelError(f"{where} in the dtype {form}, which is not read as a weight. {_REMEDY}")
            if name not in self._scales:
                raise ModelError(f"{where} in the dtype {form}, and no scales named `{name}{_SCALES[0]}`. {_REMEDY}")
            if self._method is None:
                raise ModelError(
                    f"{where} in the dtype {form}, and config.json has no `quantization_config` that says what its "
                    f"scales belong to: copy config.json again, from where the weights are from"
                )
        if self._method and (method := self._method.get("quant_method")) not in (*_METHODS, _PACKED):
            raise ModelError(
                f"{self._folder}/config.json has a `quantization_config` of the method {method!r}: known are "
                f"{', '.join((*_METHODS, _PACKED))}. {_REMEDY}"
            )

    def _block(self, name: str) -> tuple[int, ...]:
        """Return the size of the block of a matrix that one scale belongs to."""
        size, scales = self.shapes[name], self._boxes.sizes[self._scales[name]]
        outer = (1,) * (len(size) - 2)
        own = cast("Sequence[int] | None", (self._method or {}).get("weight_block_size"))
        groups = (*outer, 1, _GROUP) if self._boxes.forms[self._scales[name]] in _EXPONENTS else ()
        for block in ((*outer, *own) if own else (), size, (*outer, 1, size[-1]), groups):
            if block and _without_ones(_grid(size, block)) == _without_ones(scales):
                return block
        raise ModelError(
            f"{self._boxes.where[name]} has `{self._scales[name]}` as {list(scales)}: these are no scales of "
            f"`{name}`, {list(size)}, in blocks of {own}, in rows, or as a whole. {_REMEDY}"
        )

    def _factors(self, box: Box) -> Tensor:
        """Return the scale of each number of a box, or what broadcasts to them."""
        name, block = self._scales[box.name], self._blocks[box.name]
        size = self._boxes.sizes[name]
        scales = torch.empty(size)
        self._boxes.read([Box(name, size, (0,) * len(size), scales)])
        if self._boxes.forms[name] == "U8":
            scales = torch.exp2(scales - 127)
        factors = scales.reshape(_grid(box.size, block))
        for dim, ((start, end), length) in enumerate(zip(box.ranges, block, strict=True)):
            factors = factors.index_select(dim, torch.arange(start, end) // length)
        return factors.to(box.tensor.device)


def is_scale(name: str) -> bool:
    """True for the name of scales of any kind."""
    return name.endswith(_SCALES) or _OF_ACTIVATIONS.search(name) is not None


def _files(folder: Path) -> list[Path]:
    """Return the files that transformers reads, and no others that are in the folder."""
    if (folder / _WEIGHTS).exists() or not (index := folder / f"{_WEIGHTS}.index.json").exists():
        return [each for each in (folder / _WEIGHTS,) if each.exists()]
    table = msgspec.json.decode(index.read_bytes(), type=dict[str, object])
    return sorted({folder / name for name in cast("Mapping[str, str]", table["weight_map"]).values()})


def _pop_quantization(shape: PretrainedConfig) -> Mapping[str, object] | None:
    """Remove and return what a configuration says of its model's quantization. None if it says nothing."""
    found: Mapping[str, object] | None = None
    for each in (shape.get_text_config(), shape):
        if "quantization_config" in each.__dict__:
            found = cast("Mapping[str, object] | None", each.__dict__.pop("quantization_config")) or found
    return found


def _grid(size: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // own) for length, own in zip(size, block, strict=True))


def _without_ones(size: Sequence[int]) -> list[int]:
    return [length for length in size if length != 1]
