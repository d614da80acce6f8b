"""Images of rows: named by a hash of their bytes, referred to in texts by name, and held once in a column."""

import base64
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, cast

import numpy as np
from typing_extensions import Buffer

from meshrl.data.ragged import portable
from meshrl.errors import DataError, described
from meshrl.mesh import Array, Rows

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES: Final = "images"
"""The column of images."""
FINGERPRINTS: Final = "image_fingerprints"
"""The column of what a sampler's processor made of each image, a text for each."""
MOST_BYTES: Final = 20 << 20
"""Largest file of an image."""
MOST_PIXELS: Final = 1 << 26
"""Most pixels of an image, such as 8192 x 8192."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Files that are read, whatever their suffix."""
_SMALL: Final = 128
"""Most pixels of a side of a thumbnail."""
_MARK: Final = re.compile(r"<image:([0-9a-f]{32})>")


class Images(tuple[tuple[str, ...], ...]):  # noqa: SLOT001 -- a tuple has no slots
    """A column: the names of each row's images, in the order of its text. The bytes of each are held once."""

    pool: Mapping[str, bytes]
    """The file of each image, by name."""

    def __new__(cls, names: Iterable[Sequence[str]], pool: Mapping[str, bytes]) -> Self:
        """Make a column of names. `pool` may have more. DataError for a name that is not there."""
        self = super().__new__(cls, map(tuple, names))
        try:
            self.pool = {name: pool[name] for row in self for name in row}
        except KeyError as error:
            raise DataError(
                f"a text names the image {error.args[0]}, and the rows do not have it: give the texts and the column "
                f"`{IMAGES}` of the same rows"
            ) from None
        return self

    @classmethod
    def of(cls, rows: Iterable[Sequence[bytes]]) -> "Images":
        """Make a column of each row's files."""
        pool: dict[str, bytes] = {}
        names: list[list[str]] = []
        for row in rows:
            names.append([name_of(each) for each in row])
            pool |= zip(names[-1], row, strict=True)
        return cls(names, pool)

    @classmethod
    def joined(cls, parts: Sequence["tuple[object, ...]"], places: Iterable[tuple[int, int]] | None = None) -> "Images":
        """Join the rows of parts, or those at these places: the number of a part, and of a row in it."""
        pool = {name: each for part in parts if isinstance(part, Images) for name, each in part.pool.items()}
        rows = [row for part in parts for row in part] if places is None else [parts[at][row] for at, row in places]
        return cls(cast("list[tuple[str, ...]]", rows), pool)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.pool.values()))

    def take(self, rows: Rows | slice) -> "Images":
        """Select rows."""
        return Images(self[rows] if isinstance(rows, slice) else [self[row] for row in rows.tolist()], self.pool)

    def parts(self) -> tuple[list[tuple[str, int]], Array]:
        """Return the name and the size of each file, and all of them one after another, uint8[bytes]."""
        sizes = [(name, len(each)) for name, each in self.pool.items()]
        return sizes, np.frombuffer(b"".join(self.pool.values()), np.uint8)

    @classmethod
    def from_parts(cls, names: Iterable[Sequence[str]], sizes: Sequence[tuple[str, int]], files: Buffer) -> "Images":
        """Make a column of its names and its parts, whose buffer is copied. ValueError if they do not fit."""
        ends, view = [*accumulate((size for _, size in sizes), initial=0)], memoryview(files).cast("B")
        if ends[-1] != len(view):
            raise ValueError(f"images of {ends[-1]} bytes in a buffer of {len(view)}")
        spans = zip(sizes, pairwise(ends), strict=True)
        return cls(names, {name: bytes(view[start:end]) for (name, _), (start, end) in spans})

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., "Images"], tuple[object, ...]]:
        sizes, files = self.parts()
        return Images.from_parts, ([*self], sizes, portable(files, protocol))

    def __deepcopy__(self, memo: object) -> "Images":
        return self


def name_of(data: bytes) -> str:
    """Return the name of an image, a hash of its file."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def mark_of(name: str) -> str:
    """Return what stands for an image in a text."""
    return f"<image:{name}>"


def names_in(text: str) -> list[str]:
    """Return the names of the images in a text, in order."""
    return _MARK.findall(text)


def unmarked(text: str, known: Collection[str] = ()) -> str:
    """Return a text in which nothing stands for an image but those of `known`: what looks like it gets a space."""
    return _MARK.sub(lambda found: found[0] if found[1] in known else f"<image: {found[1]}>", text)


def pieces_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text that are not empty: texts, and names of images, which come with True."""
    for at, piece in enumerate(_MARK.split(text)):
        if piece:
            yield piece, at % 2 == 1


def shown(text: str) -> str:
    """Return a text for a person, with a short name of each image."""
    return _MARK.sub(lambda found: f"[image {found[1][:8]}]", text)


def opened(data: bytes, where: str) -> "Image":
    """Decode an image: upright, in RGB with 8 bits, and on white if it is transparent.

    DataError, which names `where`, for a file that is not whole, not of FORMATS, animated, empty, or larger than
    MOST_BYTES or MOST_PIXELS. Nothing is decoded before its size is known.
    """
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise DataError(f"{where}: images need Pillow: pip install 'meshrl[images]'") from error
    if not data or len(data) > MOST_BYTES:
        size = f"has {len(data):,} bytes, and at most {MOST_BYTES:,} are read" if data else "is an empty file"
        raise DataError(f"{where}: the image {size}")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as file:
            _check_size(file.size, where)
            if file.format != "MPO" and getattr(file, "is_animated", False):  # a camera's JPEG has previews behind it
                raise DataError(f"{where}: the image is animated: give one of its frames")
            file.load()
            return _plain(ImageOps.exif_transpose(file))
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{where}: the image has too many pixels: {error}") from error
    except Exception as error:  # a damaged file may raise anything
        kind = "this is no whole image"
        raise DataError(f"{where}: {kind}, of {', '.join(FORMATS)}: {described(error)}") from error


def file_of(image: "Image", where: str) -> bytes:
    """Return an image of Pillow as a file, as `opened` reads it. DataError, which names `where`, if it cannot be."""
    _check_size(image.size, where)
    if image.mode == "F":
        raise DataError(f"{where}: the image has floats, whose range is not known: scale it to 8 bits")
    try:
        from PIL import ImageOps  # noqa: PLC0415 -- an extra

        file = BytesIO()
        _plain(ImageOps.exif_transpose(image)).save(file, "PNG")
    except Exception as error:  # Pillow reads some files only now, and damaged ones may raise anything
        raise DataError(f"{where}: the image cannot be made RGB: {described(error)}") from error
    return file.getvalue()


def thumbnail(data: bytes) -> str:
    """Return a small copy of an image as a data URL."""
    image, file = opened(data, "an image"), BytesIO()
    image.thumbnail((_SMALL, _SMALL))
    form = "PNG" if max(image.size) < _SMALL else "JPEG"
    image.save(file, form)
    return data_url(file.getvalue(), f"image/{form.lower()}")


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    """Return a file of this media type as a data URL in base64."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _check_size(size: tuple[int, int], where: str) -> None:
    width, height = size
    if not 0 < width * height <= MOST_PIXELS:
        raise DataError(
            f"{where}: the image has {width} x {height} pixels: at most {MOST_PIXELS:,} are read: scale it down"
        )


def _plain(image: "Image") -> "Image":
    from PIL import Image  # noqa: PLC0415 -- an extra

    if image.mode.startswith("I") or image.mode == "F":  # 16 bits
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return image.convert("RGB")
