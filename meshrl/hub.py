"""Models and datasets of the Hugging Face hub: resolve names, download files, and upload models.

Cached files are read without a network. The library's settings apply: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

import errno
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, cast

from meshrl.errors import DataError, ModelError

Kind: TypeAlias = Literal["model", "dataset"]

HUB_ID: Final = r"\w[\w.-]*/[\w.-]+(@.+)?(?<!\.gguf)"
"""Pattern of a repository's name. A relative path may match too, and counts as one if it exists."""

_NO_FOLDER: Final = "there is no such folder, and "
_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"
_OF_DISKS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FILES: Final = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a model: weights and tokenizers, and nothing that would be unpickled or run."""


class Repository(NamedTuple):
    """The parts of a repository's name."""

    name: str
    revision: str | None

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Parse a repository's name. None if the text cannot be one."""
        if not re.fullmatch(HUB_ID, text):
            return None
        name, _, revision = text.partition("@")
        return cls(name, revision or None)


def pinned(text: str, kind: Kind = "model") -> str:
    """Return `ORG/NAME@COMMIT` with the current commit of the name, or the cached one without a network.

    Raises ModelError, or DataError for a dataset, if the name does not exist.
    """
    name, revision = parsed(text, kind)
    if revision and _COMMIT.fullmatch(revision):
        return text
    with explained(text, kind, _NO_FOLDER if kind == "model" else ""):
        import huggingface_hub as hub  # noqa: PLC0415
        from huggingface_hub import errors  # noqa: PLC0415

        try:
            commit = str(hub.HfApi().repo_info(name, revision=revision, repo_type=kind).sha)
        except (errors.HfHubHTTPError, errors.HFValidationError):
            raise
        except (errors.HTTPError, OSError):  # type: ignore[attr-defined]  # nobody answers
            found = hub.snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True)
            commit = Path(found).name
    return f"{name}@{commit}"


def download(text: str) -> Path:
    """Download a model's files into the cache if needed, and return their folder. Raises ModelError like `pinned`."""
    name, revision = parsed(text, "model")
    with explained(text, "model", _NO_FOLDER):
        import huggingface_hub as hub  # noqa: PLC0415

        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=_FILES))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model {text!r} has no safetensors, and other weight files are not read: choose a model that has them, "
            "or convert it with transformers' save_pretrained"
        )
    return folder


@contextmanager
def with_config(text: str) -> Generator[Path | None]:
    """Yield a folder with a model's config.json, which is fetched alone. None if there is none, or nobody answers."""
    name, revision = parsed(text, "model")
    import huggingface_hub as hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        yield Path(cached).parent
        return
    with TemporaryDirectory() as folder:  # in the cache, it would look like a whole model
        found: Path | None = Path(folder)
        try:
            hub.hf_hub_download(name, "config.json", revision=revision, local_dir=folder)
        except (errors.HfHubHTTPError, errors.HTTPError, OSError):  # type: ignore[attr-defined]
            found = None
        yield found


def create(name: str, folder: Path, *, public: bool, message: str) -> str:
    """Upload a folder's files to a model repository, created if needed, and return its address.

    A new repository is private unless `public`. An existing one keeps its visibility. Raises ModelError if the hub
    refuses.
    """
    with explained(name, "model", offline=": nothing was put there; push again with a network"):
        import huggingface_hub as hub  # noqa: PLC0415

        api = hub.HfApi()
        address = str(api.create_repo(name, private=not public, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    return address


def parsed(text: str, kind: Kind) -> Repository:
    """Parse a repository's name. Raises ModelError, or DataError for a dataset, if it is invalid."""
    found = Repository.of(text)
    if found is None:
        refused = ModelError if kind == "model" else DataError
        raise refused(f"{kind} {text!r} names nothing on the hub: write ORG/NAME, or ORG/NAME@REVISION")
    return found


@contextmanager
def explained(text: str, kind: Kind, before: str = "", offline: str = "") -> Generator[None]:
    """Turn the library's errors about a repository into ModelError, or into DataError for a dataset.

    `before`: the beginning of the message. `offline`: what to add if the hub cannot be reached.
    """
    refused = ModelError if kind == "model" else DataError
    try:
        from huggingface_hub import constants, errors  # noqa: PLC0415 -- an extra, and slow to import
    except ImportError as error:
        raise refused(f"{kind} {text!r}: the hub needs huggingface_hub: pip install 'meshrl[torch]'") from error
    name, where = text.partition("@")[0], f"{kind} {text!r}: {before}{constants.ENDPOINT}"
    page = f"{constants.ENDPOINT}/{name}"
    reasons: Mapping[type, str] = {
        errors.GatedRepoError: f"gives it to those who accepted its terms: accept them at {page}, then {_LOGIN}",
        errors.RevisionNotFoundError: "has no such revision of it: give an existing branch, tag or commit",
        errors.RepositoryNotFoundError: f"has none of this name that you may see: correct the name, or {_LOGIN}",
    }
    try:
        yield
    except errors.HfHubHTTPError as error:
        known = (reasons[each] for each in type(error).__mro__ if each in reasons)
        raise refused(f"{where} {next(known, f'refuses: {_first_line(error)}')}") from error
    except errors.HFValidationError as error:
        raise refused(f"{kind} {text!r}: {_first_line(error)}") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        if getattr(error, "errno", None) in _OF_DISKS:
            raise refused(f"{where}: its files cannot be kept in {constants.HF_HUB_CACHE}: {error}") from error
        cached = f", and the files are not in the cache: fetch them once with a network, `hf download {name}`, or name"
        raise refused(f"{where} does not answer, or HF_HUB_OFFLINE is set{offline or f'{cached} a folder'}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def dataset_rows(
    text: str, options: Mapping[str, object], rows: int | None = None, files: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Yield the rows of `ORG/NAME[@REVISION]`, split `train` by default; with `rows`, only that many.

    `files`: columns of images, which are not decoded here. `options`: arguments of `datasets.load_dataset`, such as
    `name`, the dataset's configuration, and `split`. Raises DataError if the dataset, configuration or split does not
    exist.
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
            raise DataError(f"dataset {text!r}: {_first_line(error)}") from error
        features = cast("Mapping[str, object]", getattr(found, "features", None) or {})
        for name in files:
            if (kept := _undecoded(features.get(name))) is not None:
                found = cast("Any", found).cast_column(name, kept)
        yield from map(dict, islice(found, rows))


def _undecoded(feature: object) -> object | None:
    """Return a feature of images, or of lists of them, that gives their files. None for any other."""
    import datasets  # noqa: PLC0415

    if isinstance(feature, datasets.Image):
        return cast("object", datasets.Image(decode=False))
    if isinstance(feature, list):  # how older releases write a list
        own = _undecoded(feature[0])
        return None if own is None else [own]
    if not isinstance(feature, datasets.Sequence | datasets.LargeList):
        return None
    several: Any = feature
    own = _undecoded(several.feature)
    return None if own is None else cast("object", replace(several, feature=own))
