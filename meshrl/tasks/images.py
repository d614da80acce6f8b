"""Images in the rows of a task: read from files, bytes and URLs, each once, and named in the row's texts."""

import base64
import binascii
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from typing_extensions import TypeIs

from meshrl.data import MOST_BYTES, file_of, mark_of, name_of, opened
from meshrl.errors import DataError, shortened
from meshrl.tasks.fetching import fetched

if TYPE_CHECKING:
    from PIL.Image import Image

_PARTS: Final = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
_KEYS: Final = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of such a part that may hold it."""


class Album:
    """The images of a task's rows: each file once, by name."""

    def __init__(self, keys: Sequence[str], folder: Path, hosts: Sequence[str] = ()) -> None:
        """`keys`: of rows, whose values are images. `folder`: where relative paths start. `hosts`: as for `fetched`."""
        self._keys, self._folder, self._hosts = keys, folder, hosts
        self._fetched: dict[str, bytes] = {}
        self.pool: dict[str, bytes] = {}

    def named(self, row: dict[str, object], where: str) -> tuple[dict[str, object], list[str]]:
        """Return a row with what stands for each image in texts, and the names of its images in order.

        DataError, which names `where`, for a value that is no image.
        """
        if not self._keys:
            return row, []
        named, names = dict(row), list[str]()
        for key in self._keys:
            if key not in row:
                raise DataError(f"{where}: task.images names {key!r}, which the row lacks: it has {', '.join(row)}")
            value = row[key]
            values = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
            own = [self._name(each, f"{where}: `{key}`") for each in values if each is not None]
            named[key] = "".join(map(mark_of, own))
            names += own
        return named, names

    def texts(self, messages: Sequence[object], names: Sequence[str], where: str) -> list[object]:
        """Return messages whose contents are texts: parts are joined, and images take `names` in order.

        DataError, which names `where`, if a part is neither text nor image, or has an image too many.
        """
        left = iter(names)
        found: list[object] = []
        for at, message in enumerate(messages):
            content = cast("Mapping[str, object]", message).get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, list):
                found.append(message)
                continue
            pieces = [self._piece(part, left, f"{where}: message {at}") for part in cast("list[object]", content)]
            found.append({**cast("Mapping[str, object]", message), "content": "".join(pieces)})
        return found

    def _piece(self, part: object, names: Iterator[str], where: str) -> str:
        table = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
        if isinstance(text := table.get("text"), str) and table.get("type") not in _PARTS:
            return text
        if table.get("type") in _PARTS:
            value = next((table[key] for key in _KEYS if table.get(key) is not None), None)
            if isinstance(value, Mapping) and "url" in value:
                value = cast("Mapping[str, object]", value)["url"]
            name = next(names, None) if value is None else self._name(value, where)
            if name is not None:
                return mark_of(name)
        raise DataError(
            f"{where} has the part {shortened(part)}: give {{'type': 'text', 'text': ...}}, or {{'type': 'image'}} "
            "for each image of the keys in task.images, in order"
        )

    def _name(self, value: object, where: str) -> str:
        data = self._file(value, where)
        name = name_of(data)
        if name not in self.pool:
            opened(data, where)
            self.pool[name] = data
        return name

    def _file(self, value: object, where: str) -> bytes:
        """Return the file of an image. DataError if there is none."""
        if isinstance(value, Mapping):  # the hub's and parquet's form
            table = cast("Mapping[str, object]", value)
            value = table.get("bytes") or table.get("path")
        if isinstance(value, str) and value.startswith("data:"):
            return decoded_url(value, where)
        if isinstance(value, str) and "://" in value[:16]:
            if value not in self._fetched:
                self._fetched[value] = fetched(value, self._hosts, where)
            return self._fetched[value]
        if isinstance(value, str) and value:
            try:
                with (self._folder / value).open("rb") as file:
                    return file.read(MOST_BYTES + 1)  # a longer one is refused when it is opened
            except (OSError, ValueError) as error:
                raise DataError(f"{where}: the image {shortened(value)} cannot be read: {error}") from error
        if (data := file_in(value, where)) is not None:
            return data
        raise DataError(f"{where} is {shortened(value)}: an image is a path, bytes, or a URL")


def file_in(value: object, where: str) -> bytes | None:
    """Return the file of bytes, or of an image of Pillow. None for another value. DataError as `file_of`."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    return file_of(value, where) if _is_picture(value) else None


def _is_picture(value: object) -> TypeIs["Image"]:
    """True for an image of Pillow, as datasets makes it. There is none before Pillow is imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def decoded_url(url: str, where: str) -> bytes:
    """Return the bytes of a data URL. DataError, which names `where`, if it is none in base64."""
    head, comma, text = url.partition(",")
    if comma and head.endswith(";base64"):
        with suppress(binascii.Error, ValueError):
            return base64.b64decode(text, validate=True)
    raise DataError(f"{where} is {shortened(url)}: write a data URL as data:image/png;base64,...")
