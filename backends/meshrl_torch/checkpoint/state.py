"""The checkpoint of a model in training: its tensors, its optimizer's moments, and its number of steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshrl_torch.checkpoint.numbers import Numbers, another, opened
from meshrl_torch.checkpoint.writing import Writing
from meshrl_torch.train.optimizer import Optimizer

_TENSORS: Final = "state.safetensors"
"""`model/NAME`: a tensor of the model. `model/float32/NAME`: a parameter's master. `exp_avg/NAME` and similar: AdamW's
state of a parameter."""


@dataclass(frozen=True)
class TrainingState:
    """A model in training, on one rank. `read` restores what `write` wrote, bit for bit. Nothing is pickled."""

    role: str
    """Owner of the state, for messages."""
    tensors: Mapping[str, Tensor]
    """The model's tensors by name, and the optimizer's separate masters. `read` writes to them."""
    parameters: Mapping[str, nn.Parameter]
    """The parameters that the optimizer steps over, by name."""
    optimizer: Optimizer
    _writing: Writing = field(default_factory=Writing)

    def write(self, folder: str, wait: bool) -> None:
        """Copy the present state. A thread writes the copy, as two files in a new folder.

        `wait` has no effect: only `written` waits for the files.
        """
        own = {f"model/{name}": tensor for name, tensor in self.tensors.items()} | dict(self._moments())
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in own.items()}
        numbers = Numbers(self.role, self.optimizer.steps)

        def write() -> None:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            save_file(copies, path / _TENSORS)
            numbers.write(path)

        self._writing.begin(write)

    async def written(self) -> None:
        """Wait until the last copy is written. Raises its error."""
        await self._writing.written()

    def read(self, folder: str) -> None:
        """Load the written state. ModelError, and nothing changes, if it is of another role or model."""
        path = Path(folder)
        numbers, saved = opened(path, self.role, _TENSORS, lambda: load_file(path / _TENSORS))
        self._check(path, saved)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(saved[f"model/{name}"])
        state = self._adamw_state
        state.clear()
        for full, value in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model":
                # Separate memory for each: AdamW writes to its tensors, and parameters must not share `step`.
                kept = value.to(self.parameters[name].device, copy=True)
                state.setdefault(self.parameters[name], {})[kind] = kept
        self.optimizer.steps = numbers.steps

    @property
    def _adamw_state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        adamw = self.optimizer._adamw  # noqa: SLF001 -- one package; AdamW stays hidden behind the optimizer
        return cast("dict[nn.Parameter, dict[str, Tensor]]", adamw.state)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield AdamW's state. A parameter without a gradient so far has none."""
        for name, parameter in self.parameters.items():
            for kind, value in self._adamw_state.get(parameter, {}).items():
                yield f"{kind}/{name}", value

    def _check(self, folder: Path, saved: Mapping[str, Tensor]) -> None:
        wanted = {f"model/{name}": tensor for name, tensor in self.tensors.items()}
        for full, tensor in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model" and name in self.parameters:
                wanted[full] = tensor if kind == "step" else self.parameters[name]
        for name in sorted(wanted.keys() | saved.keys()):
            there, here = _told(saved.get(name)), _told(wanted.get(name))
            if there != here:
                raise another(folder, self.role, name, there, here)


def _told(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
