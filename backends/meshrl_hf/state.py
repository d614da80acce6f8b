"""What a checkpoint keeps of a model in training: its tensors, its optimizer's moments, and the number of its steps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshrl.errors import ModelError
from meshrl_hf.optimizer import Optimizer

_TENSORS: Final = "state.safetensors"
"""`model/NAME`, a tensor of the model; `exp_avg/NAME` and the like, what AdamW keeps of a parameter."""
_NUMBERS: Final = "state.json"
_REMEDY: Final = "go on with the configuration that the checkpoint was written with, or start a run of another name"


class _Numbers(msgspec.Struct, frozen=True):
    role: str
    steps: int


@dataclass(frozen=True)
class TrainingState:
    """A model in training, on one rank: what `copied` keeps, `read` puts back, to the bit. Nothing is pickled."""

    role: str
    """Whose state it is, for messages."""
    tensors: Mapping[str, Tensor]
    """The model's own, by name; `read` writes into them."""
    parameters: Mapping[str, nn.Parameter]
    """What the optimizer steps over, by name."""
    optimizer: Optimizer

    def copied(self, folder: str) -> Callable[[], None]:
        """Copy the state as it is now; what writes the copy, two files, into a folder that is made where it is not."""
        own = {f"model/{name}": tensor for name, tensor in self.tensors.items()} | dict(self._moments())
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in own.items()}
        numbers = msgspec.json.encode(_Numbers(self.role, self.optimizer.steps))

        def write() -> None:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            save_file(copies, path / _TENSORS)
            (path / _NUMBERS).write_bytes(numbers)

        return write

    def read(self, folder: str) -> None:
        """Take what was written; ModelError, and nothing taken, where it is of another role or model."""
        numbers, saved = _open(Path(folder), self.role)
        self._check(folder, saved)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(saved[f"model/{name}"])
        state = self._adamw_state
        state.clear()
        for full, value in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model":
                # Each its own memory: AdamW writes into its tensors, and `step` may not be one for all parameters.
                kept = value.to(self.parameters[name].device, copy=True)
                state.setdefault(self.parameters[name], {})[kind] = kept
        self.optimizer.steps = numbers.steps

    @property
    def _adamw_state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        adamw = self.optimizer._adamw  # noqa: SLF001 -- one package; nobody else is to see AdamW through the optimizer
        return cast("dict[nn.Parameter, dict[str, Tensor]]", adamw.state)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """What AdamW keeps; nothing of a parameter that has had no gradient yet."""
        for name, parameter in self.parameters.items():
            for kind, value in self._adamw_state.get(parameter, {}).items():
                yield f"{kind}/{name}", value

    def _check(self, folder: str, saved: Mapping[str, Tensor]) -> None:
        wanted = {f"model/{name}": tensor for name, tensor in self.tensors.items()}
        for full, tensor in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model" and name in self.parameters:
                wanted[full] = tensor if kind == "step" else self.parameters[name]
        for name in sorted(wanted.keys() | saved.keys()):
            there, here = _told(saved.get(name)), _told(wanted.get(name))
            if there != here:
                raise ModelError(
                    f"{folder} is the state of another {self.role}: `{name.partition('/')[2]}` is {there} there and "
                    f"{here} here; {_REMEDY}"
                )


def _open(path: Path, role: str) -> tuple[_Numbers, dict[str, Tensor]]:
    try:
        numbers = msgspec.json.decode((path / _NUMBERS).read_bytes(), type=_Numbers)
        saved = load_file(path / _TENSORS)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read as the state of a {role}: {type(error).__name__}: {error}. Remove the checkpoint "
            "that it belongs to, to go on from the one before"
        ) from error
    if numbers.role != role:
        raise ModelError(f"{path} is the state of a {numbers.role}, not of a {role}; {_REMEDY}")
    return numbers, saved


def _told(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
