"""What all processes of a group of NCCL need alike: its release, and variables. Importable without torch."""

import os
from typing import Final

_ALIKE: Final = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Memory that NCCL maps itself. SGLang turns it off, and a group hangs if some members have it and others have not."""


def release() -> str:
    """Return the release that torch was built with. A group refuses members of another one."""
    from torch.cuda.nccl import version  # noqa: PLC0415 -- see above

    return ".".join(map(str, version()))


def set_alike() -> None:
    """Set what the user has not set. Called before NCCL is first used."""
    for name, value in _ALIKE.items():
        os.environ.setdefault(name, value)
