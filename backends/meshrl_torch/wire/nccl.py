"""NCCL's variables that all processes of a group have to set alike. Importable without torch."""

import os
from typing import Final

_ALIKE: Final = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Memory that NCCL maps itself. SGLang turns it off, and a group hangs if some members have it and others have not."""


def set_alike() -> None:
    """Set what the user has not set. Called before NCCL is first used."""
    for name, value in _ALIKE.items():
        os.environ.setdefault(name, value)
