"""A server's workers, which load the weights of a folder on request."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from meshrl_inference.naming import Naming
from meshrl_vllm import transfer

NAME = transfer.NAME
"""vLLM's name of the engine that begins and ends an update. Importing it registers it."""


class Extension:
    """Additional methods of a worker."""

    weight_transfer_engine: Any

    def take_folder(self, folder: str) -> None:
        """Load the tensors of a Hugging Face folder, between the beginning and the end of an update.

        ValueError, and nothing is loaded, if some are missing or have another shape than the model's.
        """
        engine = self.weight_transfer_engine
        tensors = dict(_tensors(Path(folder)))
        for name, shape in Naming(engine.model_config.model).filed().items():
            found = list(tensors[name].shape) if name in tensors else "missing"
            if found != shape:
                raise ValueError(f"`{name}` is {found} in {folder} and {shape} in the model that is served")
        engine.begin()
        engine.model.load_weights(iter(tensors.items()))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()
