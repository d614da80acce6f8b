"""Rows of datasets on the hub."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from meshrl.errors import DataError
from meshrl.hub.repository import explained, parsed, pinned


def dataset_rows(text: str, options: Mapping[str, object], rows: int | None = None) -> Iterator[dict[str, object]]:
    """Yield the rows of `ORG/NAME[@REVISION]`, split `train` by default; with `rows`, only that many.

    `options`: arguments of `datasets.load_dataset`, such as `name`, the dataset's configuration, and `split`. Raises
    DataError if the dataset, configuration or split does not exist.
    """
    name, revision = parsed(text, "dataset")
    try:
        import datasets  # noqa: PLC0415 -- an extra, and slow to import
        from datasets.exceptions import DatasetNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            f"dataset {text!r}: datasets of the hub need the package datasets: pip install 'meshrl[tasks]'"
        ) from error
    load = cast("Callable[..., Iterable[Mapping[str, object]]]", datasets.load_dataset)
    with explained(text, "dataset"):
        try:
            found = load(name, **{"split": "train", "revision": revision, "streaming": rows is not None, **options})
        except DatasetNotFoundError:
            pinned(text, "dataset")  # raises, with the reason
            raise
        except (ValueError, TypeError) as error:
            raise DataError(f"dataset {text!r}: {str(error).partition(chr(10))[0]}") from error
        for number, row in enumerate(found):
            if number == rows:
                return
            yield dict(row)
