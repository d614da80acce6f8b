"""Images as a model reads them: its own processor makes their pixels, and the text that stands for each."""

import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from meshrl.data import FINGERPRINTS, IMAGES, Batch, Images, opened
from meshrl.errors import DataError, ModelError, described
from meshrl_torch.model.attention import moved

if TYPE_CHECKING:
    from PIL.Image import Image

    from meshrl_torch.model.packing import MicroBatch

_TABLES: Final = ("processor_config.json", "preprocessor_config.json")
"""Files of a folder whose model sees."""
_KEPT: Final = 256 << 20
"""Bytes of pixels that are kept for later passes."""
_OF_TEXT: Final = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_PLACED: Final = "image_grid_thw"
"""The name of sizes from which a body also makes positions."""
_LOOK: Final = "get_image_features"
"""The method by which a body looks at images."""
_DEEP: Final = "deepstack_features"
"""The name of what a body sees in addition, for several of its layers."""
_KINDS: Final = ("mm_token_type_ids", "token_type_ids")
"""Names of what tells a model which tokens are of an image."""


@dataclass(frozen=True)
class ImageInputs:
    """What a processor makes of an image."""

    text: str
    """Stands for the image in a text."""
    tokens: int
    """Number of tokens of that text which get features of the image."""
    inputs: Mapping[str, Tensor]
    """Pixels and sizes, as the model takes them."""
    fingerprint: str
    """A hash of all of these."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(each.nbytes for each in self.inputs.values())


@dataclass(frozen=True)
class Taken:
    """What a body takes for the images of a micro-batch. It looks at each once, however many rows have it."""

    inputs: Mapping[str, Tensor]
    """With the ids, and the sizes of all images in turn."""
    once: Mapping[str, Tensor]
    """Pixels and sizes of the images that it looks at: the different ones, or all if a body cannot look once."""
    tokens: Sequence[int]
    """Of each image that it looks at."""
    which: Sequence[int]
    """The number among these of each image in turn."""

    def to(self, device: torch.device) -> "Taken":
        """Return the same with its tensors on the device."""
        once = {name: moved(each, device) for name, each in self.once.items()}
        same = {name for name, each in self.once.items() if self.inputs.get(name) is each}
        rest = {name: moved(each, device) for name, each in self.inputs.items() if name not in same}
        return replace(self, inputs={**{name: once[name] for name in same}, **rest}, once=once)

    def read(self, body: nn.Module, **given: object) -> Any:
        """Return what a body makes of these and what else is given to it."""
        owner = cast("Any", body)
        if len(self.which) == len(self.tokens):
            return owner(**{**given, **self.inputs})
        look = getattr(owner, _LOOK)
        known = [*signature(look).parameters]

        def looked(*first: object, **how: object) -> Any:
            return self._for_all(look(**{**dict(zip(known, first, strict=False)), **how, **self.once}))

        setattr(owner, _LOOK, looked)
        try:
            return owner(**{**given, **self.inputs})
        finally:
            delattr(owner, _LOOK)

    def _for_all(self, seen: Any) -> Any:
        """Repeat what was seen of the different images for all images in turn."""

        def repeated(features: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
            whole = features if isinstance(features, Tensor) else torch.cat([*features])
            own = whole.reshape(-1, whole.shape[-1]).split([*self.tokens])
            made = torch.cat([own[number] for number in self.which])
            return made[None] if isinstance(features, Tensor) else [made]

        seen.pooler_output = repeated(seen.pooler_output)
        if deep := getattr(seen, _DEEP, None):
            setattr(seen, _DEEP, [*map(repeated, deep)])
        return seen


class FilledText(NamedTuple):
    """A text with what stands for its images."""

    text: str
    grown: Sequence[tuple[int, int]]
    """For each image, from which character of the text before, and by how many, it grew."""

    def place(self, at: int) -> int:
        """Return where a character of the text before is now."""
        return at + sum(size for start, size in self.grown if start < at)


class Vision:
    """How a model sees: its processor, which is read when the first image comes."""

    def __init__(
        self, shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: Path | ProcessorMixin
    ) -> None:
        """`source`: the model's folder, or a new model's processor."""
        self._shape, self._tokenizer, self._source = shape, tokenizer, source
        self._kept: dict[str, ImageInputs] = {}
        self._held: WeakValueDictionary[str, ImageInputs] = WeakValueDictionary()
        self._turn = RLock()  # of threads that use the processor
        named = (getattr(shape, name, None) for name in ("image_token_id", "image_token_index"))
        self.token: int = next((each for each in named if isinstance(each, int)), -1)
        """The token whose embedding is replaced by a feature of an image."""

    @classmethod
    def of(cls, shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> "Vision | None":
        """Return how the model of a folder sees. None if it does not, or has no processor."""
        known = PROCESSOR_MAPPING.get(type(shape), None)
        if known is None or not any((folder / name).is_file() for name in _TABLES):
            return None
        made = cls(shape, tokenizer, folder)
        return made if made.token >= 0 else None

    @cached_property
    def processor(self) -> Any:
        """The model's processor, which keeps in `replaced` the texts that stand for images. ModelError without one."""
        source = self._source
        own: Any = type(source) if isinstance(source, ProcessorMixin) else PROCESSOR_MAPPING[type(self._shape)]
        recording = cast("type[Any]", type(own.__name__, (_Recording, own), {}))
        try:
            if isinstance(source, ProcessorMixin):
                source.__class__ = recording
                return source
            module = sys.modules[own.__module__]
            if vars(module).get("num2words", True) is None:  # SmolVLM's, which its processor asks for and videos use
                vars(module)["num2words"] = str
            table, _ = own.get_processor_dict(source, local_files_only=True)
            parts: list[object] = []
            for name in own.get_attributes():
                if name == "tokenizer":
                    parts.append(self._tokenizer)
                elif name == "image_processor":
                    parts.append(AutoImageProcessor.from_pretrained(source, backend="pil", local_files_only=True))
                else:  # such as videos, which are not read
                    parts.append(None)
            return recording.from_args_and_dict(parts, table)
        except Exception as error:
            raise ModelError(f"{source}: the processor of images cannot be read: {described(error)}") from error

    def save(self, folder: Path) -> None:
        """Write the processor's tables into a model's folder."""
        if isinstance(self._source, Path):
            for file in self._source.glob("*processor_config.json"):
                shutil.copy(file, folder)
        else:
            self._source.save_pretrained(folder)

    def seen(self, images: Images, name: str, where: str) -> ImageInputs:
        """Return what the processor makes of an image. DataError, which names `where`, if it cannot be read."""
        if (kept := self._kept.get(name)) is not None:
            return kept
        with self._turn:
            return self._kept.get(name) or self._made(images, name, where)

    def hold(self, images: Images, names: Sequence[str], where: str) -> Sequence[ImageInputs]:
        """Return what `put` needs of images, which it finds without their pixels while this is held.

        DataError as for `seen`. Any thread may call it, so that the one that calls `put` decodes and waits for nothing.
        """
        found: list[ImageInputs] = []
        for name in names:
            seen = self.seen(images, name, where)
            with self._turn:
                found.append(self._held.setdefault(name, replace(seen, inputs={})))
        _ = self._side_by_side
        return found

    def _made(self, images: Images, name: str, where: str) -> ImageInputs:
        if name not in images.pool:
            raise DataError(f"{where}: the text names the image {name}, which the column `{IMAGES}` does not have")
        image = opened(images.pool[name], where)
        try:
            inputs, (text,) = self._processed([image])
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{where}: the model's processor refuses the image: {described(error)}") from error
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        for key, value in sorted(inputs.items()):
            digest.update(f"{key}{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.contiguous().numpy().tobytes())
        seen = self._kept[name] = ImageInputs(text, list(ids).count(self.token), inputs, digest.hexdigest())
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return seen

    def put(self, text: str, names: Sequence[str], images: Images, where: str) -> FilledText:
        """Put what stands for images into a text, in the places of the processor's token for one.

        DataError if it has not as many of these as names.
        """
        token = str(self.processor.image_token) if names else str(self._tokenizer.decode([self.token]))
        pieces = text.split(token)
        if len(names) > 1:
            _ = self._dims  # which may refuse several
        if len(pieces) != 1 + len(names):
            raise DataError(
                f"{where}: the text has {token!r} {len(pieces) - 1} times, for {len(names)} images: it stands for one. "
                "Remove it from the text, or use a chat template that puts it once for each image"
            )
        whole, grown, at = pieces[0], list[tuple[int, int]](), len(pieces[0])
        for name, piece in zip(names, pieces[1:], strict=True):
            own = (self._held.get(name) or self.seen(images, name, where)).text
            grown.append((at, len(own) - len(token)))
            whole, at = whole + own + piece, at + len(token) + len(piece)
        return FilledText(whole, grown)

    def fingerprints(self, images: Images) -> list[tuple[str, ...]]:
        """Return those of each row's images."""
        return [
            tuple(self.seen(images, name, f"row {row}").fingerprint for name in own) for row, own in enumerate(images)
        ]

    def check(self, batch: Batch) -> None:
        """Raise DataError if the tokens of a row are not those of its images, or a sampler has seen something else."""
        images = images_of(batch) or Images([()] * len(batch), {})
        had = batch.objects(FINGERPRINTS) if FINGERPRINTS in batch else None
        for row, (names, ids) in enumerate(zip(images, batch.tokens, strict=True)):
            where = batch.place(row)
            seen = [self.seen(images, name, where) for name in names]
            found, wanted = int((ids[:-1] == self.token).sum()), sum(each.tokens for each in seen)
            if found != wanted:
                raise DataError(
                    f"{where} has {found} tokens of images, and this model's processor makes {wanted} of its "
                    f"{len(names)} images: encode the row with the processor of this model"
                )
            own = tuple(each.fingerprint for each in seen)
            if had is not None and own != tuple(cast("Sequence[str]", had[row])):
                raise DataError(
                    f"{where}: the sampler's processor made {had[row]} of its images, and this role's makes {own}: "
                    "give both the same model folder, and the same versions of transformers and Pillow"
                )

    def inputs(self, network: nn.Module, batch: Batch, micro: "MicroBatch") -> Taken | None:
        """Return what a model takes for the images of a padded micro-batch, with its ids. None if it has no image."""
        images = images_of(batch)
        if images is None or not any(images):
            return None
        ids, read = micro.ids.numpy(), micro.read.reshape(micro.ids.shape)
        rows = np.searchsorted(batch.tokens.offsets, read[:, 0], side="right") - 1
        lengths = read[:, -1] - read[:, 0] + 1
        names: list[tuple[str, str]] = []
        for own, row, length in zip(ids, rows.tolist(), lengths.tolist(), strict=True):
            where, left = batch.place(row), int((own[:length] == self.token).sum())
            for name in images[row]:
                if left <= 0:
                    break
                left -= self.seen(images, name, where).tokens
                names.append((name, where))
            if left:
                raise DataError(f"{where} ends inside an image, or has another's tokens: learn what follows its images")
        return self.taken(network, ids, lengths, images, names)

    def taken(
        self,
        network: nn.Module,
        ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        images: Images,
        names: Sequence[tuple[str, str]],
    ) -> Taken | None:
        """Return what a model takes for these images and ids, int64[rows, tokens], of rows of these lengths.

        `names`: of the images in order, each with its place. None if there are none.
        """
        if not names:
            return None
        known = signature(type(network).forward).parameters
        places = dict(names)
        seen = {name: self.seen(images, name, where) for name, where in places.items()}
        looked = [*places.items()] if hasattr(network, _LOOK) else names
        joined = self._joined([seen[name] for name, _ in looked], images, looked)
        once = {key: value for key, value in joined.items() if key in known}
        made = dict(once)
        if _PLACED in once:
            made[_PLACED] = torch.cat([seen[name].inputs[_PLACED] for name, _ in names])
        own = np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, (self.token + 1) % 2)
        made["input_ids"] = torch.from_numpy(own)
        for kind in _KINDS:
            if kind in known:
                types = np.array(self.processor.create_mm_token_type_ids(own.tolist()), np.int64)
                after = np.cumsum((own == self.token)[:, ::-1], 1)[:, ::-1] == 0  # nothing later is of an image
                made[kind] = torch.from_numpy(np.where(after, 0, types))
                break
        order = {name: number for number, (name, _) in enumerate(looked)}
        return Taken(made, once, [seen[name].tokens for name, _ in looked], [order[name] for name, _ in names])

    def _joined(
        self, seen: Sequence[ImageInputs], images: Images, names: Sequence[tuple[str, str]]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of several images as the processor makes them of all."""
        if len(seen) == 1:
            return seen[0].inputs
        try:
            return {key: torch.cat([each.inputs[key] for each in seen], self._dims[key]) for key in seen[0].inputs}
        except (RuntimeError, KeyError):  # images of several sizes, which it pads
            return self._processed([opened(images.pool[name], where) for name, where in names])[0]

    @property
    def _dims(self) -> Mapping[str, int]:
        """The dim in which the processor joins the tensors of several images, by their names.

        ModelError for a processor that makes something else of an image next to another.
        """
        if self._side_by_side is None:
            raise ModelError(
                f"{self._source}: the processor makes other tokens of an image next to another, which meshrl does not "
                "support: give one image a row"
            )
        return self._side_by_side

    @cached_property
    def _side_by_side(self) -> Mapping[str, int] | None:
        """What `_dims` is. None if it raises."""
        from PIL import Image  # noqa: PLC0415 -- an extra

        file = Image.new("RGB", (32, 32), "red")
        (one, texts), (two, both) = self._processed([file]), self._processed([file, file])
        if both != texts * 2:
            return None
        grown = {
            key: [dim for dim, size in enumerate(one[key].shape) if two[key].shape[dim] != size]
            for key in one
            if one[key].dim() == two[key].dim()
        }
        return {key: dims[0] for key, dims in grown.items() if len(dims) == 1}

    def _processed(self, files: Sequence["Image"]) -> tuple[Mapping[str, Tensor], list[str]]:
        """Return the tensors of images, and the text that stands for each."""
        with self._turn:
            processor = self.processor
            processor.replaced = []
            made = processor(images=[*files], text=[processor.image_token * len(files)], return_tensors="pt")
            inputs = {key: value for key, value in made.items() if key not in _OF_TEXT and isinstance(value, Tensor)}
            return inputs, [*processor.replaced]


class _Recording:
    """A processor without what reads videos, which keeps the texts that stand for images."""

    replaced: list[str]

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
        """Take what was read, and None for the rest."""

    def replace_image_token(self, *args: Any, **options: Any) -> str:
        """Return what stands for an image."""
        text = str(super().replace_image_token(*args, **options))  # type: ignore[misc]
        self.replaced.append(text)
        return text


def images_of(batch: Batch) -> Images | None:
    """Return the images of a batch. None if it has no such column, or no row."""
    if IMAGES in batch and isinstance(column := batch[IMAGES], Images):
        return column
    return None


def vision_modules(network: PreTrainedModel) -> Mapping[str, nn.Module]:
    """Return the modules of a body that are not its language model, by name: what sees, and what joins the two."""
    decoder = network.get_decoder()
    outer = {name: each for name, each in network.named_modules() if any(own is decoder for own in each.children())}
    return {
        f"{path}.{name}" if path else name: each
        for path, owner in outer.items()
        for name, each in owner.named_children()
        if each is not decoder and each is not network.get_output_embeddings() and owner is not network
    }
