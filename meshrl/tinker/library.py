"""What a server keeps for each tenant on disk: sessions, models, sampling sessions and checkpoints.

TENANT/sessions/SESSION.json
TENANT/samplers/SAMPLER.json
TENANT/models/MODEL/about.json
TENANT/models/MODEL/weights/NAME            a state: weights and optimizer
TENANT/models/MODEL/sampler_weights/NAME    weights for samplers
TENANT/models/MODEL/external_weights/NAME   the weights as other libraries read them

A tenant's code reads and writes below the tenant's folder alone. Folders are complete or absent: they are written under
another name, and renamed.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from meshrl.errors import DataError

T = TypeVar("T", bound=msgspec.Struct)

Kind: TypeAlias = Literal["training", "sampler", "external"]
FOLDERS: Final[dict[Kind, str]] = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""The name of each kind in paths."""
_KINDS: Final[dict[str, Kind]] = {name: kind for kind, name in FOLDERS.items()}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of checkpoints and tenants."""
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}(:(train|sample):\d{1,9})?")
"""Names of sessions, models and samplers."""
_PART: Final = re.compile(r"\..+-[0-9a-f]{8}")
"""Names of what is being written or removed."""
_OLD: Final = ".old~"
"""The end of the name of a checkpoint while another one takes its place."""
_PREFIX: Final = "tinker://"
_ABOUT: Final = "about.json"


class Session(msgspec.Struct, frozen=True):
    """A client's session."""

    id: str
    created: float
    """Unix seconds, as all times here."""
    user_metadata: dict[str, object] | None = None
    tags: list[str] = []
    project_id: str | None = None
    display_name: str | None = None
    finished: str | None = None
    """How it ended, as the client said. None while it is open."""


class Model(msgspec.Struct, frozen=True):
    """A model in training."""

    id: str
    session: str
    base_model: str
    created: float
    rank: int | None = None
    """The rank of its adapters. None if all weights are trained."""
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    user_metadata: dict[str, object] | None = None


class Sampler(msgspec.Struct, frozen=True):
    """A sampling session."""

    id: str
    base_model: str
    path: str | None
    """The weights that it samples from. None: those of the base model."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What was saved of a model."""

    path: str
    kind: Kind
    model: Model
    time: float
    seq_id: int
    """The request that wrote it, so that a repetition does not write it again."""
    size_bytes: int = 0
    public: bool = False
    expires: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """Its kind and name, as the API has it."""
        return self.path.removeprefix(_PREFIX).partition("/")[2]


class Parsed(NamedTuple):
    """The parts of a path, `tinker://MODEL/KIND/NAME`."""

    model: str
    kind: Kind
    name: str


def path_of(model: str, kind: Kind, name: str) -> str:
    """Return the path of a checkpoint. DataError if the name is not one."""
    if not _NAME.fullmatch(name):
        raise DataError(f"{name!r} is no name for a checkpoint: take letters, digits, dots, dashes and underscores")
    return f"{_PREFIX}{model}/{FOLDERS[kind]}/{name}"


def parsed(path: str) -> Parsed:
    """Return the parts of a path. DataError if it has others, such as `..`."""
    parts = path.removeprefix(_PREFIX).split("/")
    fits = path.startswith(_PREFIX) and len(parts) == 3 and parts[1] in _KINDS
    if not (fits and _ID.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])):
        raise DataError(
            f"{path!r} is no path of a checkpoint: it is tinker://MODEL/KIND/NAME, and KIND one of {', '.join(_KINDS)}"
        )
    return Parsed(parts[0], _KINDS[parts[1]], parts[2])


class Shelf:
    """What belongs to one tenant."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        for name in ("sessions", "samplers", "models"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._recover()

    def _recover(self) -> None:
        """Put back checkpoints that a kill took away before their successors were there, and remove parts."""
        places = ("sessions/.*", "samplers/.*", "models/*/.*", "models/*/*weights/.*", "models/*/*weights/*/.*")
        for path in [path for place in places for path in self.folder.glob(place)]:
            kept = path.with_name(path.name.removeprefix(".").removesuffix(_OLD))
            if path.name.endswith(_OLD) and not kept.exists():
                path.rename(kept)
            elif path.name.endswith(_OLD) or _PART.fullmatch(path.name):
                clear(path) if path.is_dir() else path.unlink()

    def put_session(self, session: Session) -> None:
        """Keep a session."""
        _write(self.folder / "sessions" / f"{_checked(session.id)}.json", session)

    def session(self, name: str) -> Session | None:
        """Return a session. None if the tenant has none of this name."""
        return _read(self.folder / "sessions" / f"{_checked(name)}.json", Session)

    def sessions(self) -> list[Session]:
        """Return all sessions, the newest first."""
        found = (_read(path, Session) for path in (self.folder / "sessions").glob("*.json"))
        return sorted((each for each in found if each), key=lambda each: -each.created)

    def put_sampler(self, sampler: Sampler) -> None:
        """Keep a sampling session."""
        _write(self.folder / "samplers" / f"{_checked(sampler.id)}.json", sampler)

    def sampler(self, name: str) -> Sampler | None:
        """Return a sampling session. None if the tenant has none of this name."""
        return _read(self.folder / "samplers" / f"{_checked(name)}.json", Sampler)

    def samplers(self, session: str) -> list[str]:
        """Return the names of a session's sampling sessions."""
        return sorted(path.stem for path in (self.folder / "samplers").glob(f"{_checked(session)}:*.json"))

    def model_folder(self, name: str) -> Path:
        """Return the folder of a model."""
        return self.folder / "models" / _checked(name)

    def put_model(self, model: Model) -> None:
        """Keep a new model."""
        self.model_folder(model.id).mkdir(exist_ok=True)
        _write(self.model_folder(model.id) / _ABOUT, model)

    def model(self, name: str) -> Model | None:
        """Return a model. None if the tenant has none of this name."""
        return _read(self.model_folder(name) / _ABOUT, Model)

    def models(self) -> list[Model]:
        """Return all models, the newest first."""
        found = (_read(path, Model) for path in (self.folder / "models").glob(f"*/{_ABOUT}"))
        return sorted((each for each in found if each), key=lambda each: -each.created)

    def checkpoints(self, model: str | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints of a model, or of all, that have not expired. Removes those that have."""
        within = _checked(model) if model is not None else "*"
        for path in sorted((self.folder / "models").glob(f"{within}/*weights/[!.]*/{_ABOUT}")):
            found = _read(path, Checkpoint)
            if found is not None and found.expires is not None and found.expires <= time.time():
                self.remove(path.parent)
            elif found is not None:
                yield found

    def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint."""
        model, kind, name = parsed(path)
        return self.model_folder(model) / FOLDERS[kind] / name

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Return a checkpoint. None if the tenant has none under this path, or it has expired."""
        found = _read(self.checkpoint_folder(path) / _ABOUT, Checkpoint)
        if found is not None and found.expires is not None and found.expires <= time.time():
            self.remove(self.checkpoint_folder(path))
            return None
        return found

    def change(self, checkpoint: Checkpoint) -> None:
        """Keep other facts about a checkpoint."""
        _write(self.checkpoint_folder(checkpoint.path) / _ABOUT, checkpoint)

    def remove(self, folder: Path) -> None:
        """Remove a folder. If it is interrupted, what is left no longer counts."""
        gone = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        try:
            folder.rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    @contextmanager
    def writing(self, checkpoint: Checkpoint) -> Generator[Path]:
        """Write a checkpoint into the folder that this yields. At the end of the block it replaces one of its path."""
        folder = self.checkpoint_folder(checkpoint.path)
        part = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
        part.mkdir(parents=True)
        try:
            yield part
            size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
            _write(part / _ABOUT, msgspec.structs.replace(checkpoint, size_bytes=size))
            sync(part)
            old = folder.with_name(f".{folder.name}{_OLD}")
            with suppress(FileNotFoundError):
                folder.rename(old)
            part.rename(folder)
            flush(folder.parent)
            clear(old)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def nbytes(self) -> int:
        """Return the bytes of all files of models: checkpoints that have not expired, states and journals."""
        for _ in self.checkpoints():  # which removes those that have
            pass
        return sum(_size(path) for path in (self.folder / "models").rglob("*"))


class Library:
    """The shelves of all tenants."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._shelves: dict[str, Shelf] = {}

    def shelf(self, tenant: str) -> Shelf:
        """Return what belongs to a tenant."""
        if tenant not in self._shelves:
            if not _NAME.fullmatch(tenant):
                raise DataError(f"{tenant!r} is no name for a tenant")
            self._shelves[tenant] = Shelf(self.folder / tenant)
        return self._shelves[tenant]

    def tenants(self) -> list[str]:
        """Return the names of all tenants that have something."""
        return sorted(path.parent.name for path in self.folder.glob("*/models"))

    def find(self, tenant: str, path: str) -> tuple[Checkpoint, Path]:
        """Return a checkpoint that a tenant may read, and its folder: the tenant's own, or a published one.

        DataError, the same for a checkpoint of others as for none at all.
        """
        for owner in (tenant, *(other for other in self.tenants() if other != tenant)):
            shelf = self.shelf(owner)
            found = shelf.checkpoint(path)
            if found is not None and (owner == tenant or found.public):
                return found, shelf.checkpoint_folder(path)
        raise DataError(f"there is no checkpoint {path}: it was never saved, has expired, or belongs to someone else")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # it was removed meanwhile
        return 0


def _checked(name: str) -> str:
    if not _ID.fullmatch(name):
        raise DataError(f"{name!r} is no name of a session, a model or a sampler")
    return name


def _write(path: Path, value: msgspec.Struct) -> None:
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    part.write_bytes(msgspec.json.encode(value))
    flush(part)
    part.replace(path)
    flush(path.parent)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise DataError(f"{path} cannot be read: {error}. Restore it, or remove its folder") from error


def sync(folder: Path) -> None:
    """Flush a folder's files to disk, so that a crash of the machine cannot undo what a rename announces."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def clear(folder: Path) -> None:
    """Remove a folder, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
