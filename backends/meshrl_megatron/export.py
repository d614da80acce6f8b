"""Save a model that is spread over ranks as one Hugging Face folder. No rank holds all of it in memory."""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from meshrl_megatron.model import Model
from meshrl_megatron.world import World
from meshrl_torch.model import saving as checkpoint

_HEAD = "value_head."


def save(model: Model, folder: str) -> None:
    """Write the model, and a critic's head in its own file, completely or not at all. All ranks call it together.

    Each rank writes its share to a folder next to it. The first rank reads from there as it writes.
    """
    world = model.world
    with _beside(Path(folder).expanduser(), world) as parts:
        own = {name: tensor.cpu().contiguous() for name, tensor in model.tensors()}
        world.agree(lambda: save_file(own, parts / f"{world.number}.safetensors"))

        def write() -> None:
            tensors = dict(model.unused())
            for file in sorted(parts.glob("*.safetensors")):
                tensors |= load_file(file)  # mapped
            head = {name.removeprefix(_HEAD): tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
            dtype = model.config.params_dtype
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            checkpoint.write(model.words, folder, head or None, tensors)

        world.first(write)


@contextmanager
def _beside(folder: Path, world: World) -> Generator[Path]:
    """Yield a folder that all ranks see. It is removed at the end."""

    def made() -> str:
        if world.number:
            return ""
        folder.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f".{folder.name}-parts-", dir=folder.parent)

    place = world.agree(made)[0]
    try:
        yield Path(place)
    finally:
        if world.number == 0:
            shutil.rmtree(place, ignore_errors=True)
