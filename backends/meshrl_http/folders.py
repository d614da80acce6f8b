"""New weights as whole Hugging Face folders, in a place that servers can read."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from meshrl.errors import ConfigError
from meshrl_inference.engine_side.loading import Naming, shared_tensors
from meshrl_inference.engine_side.protocol import SharedBucket

_FILE: Final = 4 << 30
"""Size in bytes at which a new file begins."""


class Folders:
    """The folders of one sampler's weights, all in one that is removed at the end."""

    def __init__(self, place: str, session: str, model: Path, naming: Naming) -> None:
        """Raises ConfigError if nothing can be written there."""
        self._model = model
        self._naming = naming
        self._own = Path(place).expanduser().absolute() / session
        try:
            self._own.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"sampler.http.weights: {self._own} cannot be created: {error.strerror}: name a folder that this rank "
                "may write, and that the servers see under the same path"
            ) from None

    def of_model(self) -> str:
        """Return a folder with the model's original weights. ConfigError if these are not safetensors."""
        files = sorted(self._model.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self._model} has no safetensors, which the servers need for their first weights")
        return self._write("model", _in_files(files))

    def of(self, name: str, buckets: Sequence[SharedBucket]) -> str:
        """Write a folder of a policy's weights from shared memory."""
        return self._write(name, self._naming.in_files(shared_tensors(buckets)))

    def keep(self, folder: str) -> None:
        """Remove all other folders."""
        for other in self._own.iterdir():
            if str(other) != folder:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove all folders."""
        shutil.rmtree(self._own, ignore_errors=True)

    def _write(self, name: str, named: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Write a folder, and name it once it is complete. OSError, with nothing left, if it cannot be written."""
        made = self._own / f"{name}.part"
        try:
            made.mkdir()
            for number, held in enumerate(_file_batches(self._with_tied(named)), 1):
                save_file(held, made / f"model-{number:05}.safetensors", {"format": "pt"})
            for file in self._model.glob("*.json"):
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, made)
            return str(made.rename(self._own / name))
        except BaseException as error:
            shutil.rmtree(made, ignore_errors=True)
            if isinstance(error, SafetensorError):  # safetensors reports a disk's errors this way
                raise OSError(str(error)) from error
            raise

    def _with_tied(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Repeat tied tensors under their other names, because a server may store them separately."""
        others = self._naming.tied()
        logged = set[str]()
        for name, tensor in named:
            for each in (name, *others.get(name, ())):
                if each not in logged:
                    logged.add(each)
                    yield each, tensor if each == name else tensor.clone()


def _in_files(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- it is not a dict
                yield name, opened.get_tensor(name)


def _file_batches(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of one file at a time."""
    lot: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named:
        lot[name] = tensor.contiguous()
        size += tensor.nbytes
        if size > _FILE:
            yield lot
            lot, size = {}, 0
    if lot:
        yield lot
