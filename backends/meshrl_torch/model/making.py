"""Make networks while other threads of the process make theirs."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

MAKING: Final = threading.RLock()
"""One network at a time: construction seeds torch and sets its dtype, and reading or writing quiets transformers, for
all threads."""


class WithoutValues(TorchFunctionMode):
    """Gives no memory to what `torch.empty` makes in this thread, as modules make parameters by it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **on_meta})
