"""Count the bytes of tensors that are alive, and their peak."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_Mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode  # torch has no public name for it


class Live(_Mode):  # type: ignore[misc]  # its type is not known
    """Counts the storages that operations make inside the block, until they are freed. Includes fake ones.

    Memory that a kernel uses internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self._peak = 0
        self._sizes: Final[dict[int, int]] = {}
        self._resize: Final[Callable[[torch.UntypedStorage, int], torch.UntypedStorage]] = torch.UntypedStorage.resize_

    def peak(self) -> int:
        """Return the peak since the last call."""
        most, self._peak = self._peak, self.now
        return most

    def __enter__(self) -> Self:
        # FSDP allocates and frees whole parameters without the dispatcher.
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            self._see(storage)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for each in _tensors(made):
            self._see((each.to_local() if isinstance(each, DTensor) else each).untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 -- identifies a storage
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak = max(self._peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(made: object) -> Iterator[Tensor]:
    """Yield the tensors in an operation's result, which may be in lists."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, list | tuple):
        for each in cast("Iterable[object]", made):
            yield from _tensors(each)
