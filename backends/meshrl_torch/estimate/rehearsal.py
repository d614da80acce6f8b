"""A rehearsal of a model's passes, with tensors that have shapes but no memory: it counts the bytes that are alive."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple, Self, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshrl.errors import ConfigError
from meshrl.roles import MemoryTerm
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.scores import Scores

fake: Final = import_module("torch._subclasses.fake_tensor")  # torch has no public name for it, nor for the next
_Mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode


class LiveBytes(_Mode):  # type: ignore[misc]  # its type is not known
    """Counts the storages that operations make inside the block, until they are freed. Includes fake ones.

    Memory that a kernel uses internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self._peak = 0
        self._sizes: Final[dict[int, int]] = {}
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self._see(storage)
            return storage

        # FSDP allocates and frees whole parameters without the dispatcher.
        self._resizes = patch.object(torch.UntypedStorage, "resize_", seen)

    def peak(self) -> int:
        """Return the peak since the last call."""
        most, self._peak = self._peak, self.now
        return most

    def __enter__(self) -> Self:
        self._resizes.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._resizes.stop()
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for each in _tensors(result):
            self._see((each.to_local() if isinstance(each, DTensor) else each).untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 -- identifies a storage
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak = max(self._peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(result: object) -> Iterator[Tensor]:
    """Yield the tensors in an operation's result, which may be in lists."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in cast("Iterable[object]", result):
            yield from _tensors(each)


class Figures(NamedTuple):
    """Bytes that a rank holds of a model."""

    parameters: int
    masters: int = 0
    moments: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    head: int = 0
    """The peak beyond these while the head and its gradient are computed."""
    workspace: int = 0
    """What the rest of the pass needs beyond that."""

    def terms(self, during: str, *, host: bool) -> list[MemoryTerm]:
        """Return the figures that are not 0, with their formulas."""
        return [
            MemoryTerm(name, size, when and during, text, host)
            for size, (name, when, text) in zip(self, _TERMS, strict=True)
            if size
        ]


_TERMS: Final = (
    ("parameters", "", "each parameter and buffer of the rank, in the dtype that it is kept in"),
    ("masters", "", "4 bytes for each trained parameter of a narrower dtype"),
    ("moments", "", "8 bytes for each trained parameter: AdamW's two, in float32"),
    ("gradients", "during", "4 bytes for each trained parameter: float32, summed over micro-batches"),
    ("gathered", "during", "embeddings and head, whole in the dtype of the passes"),
    ("activations", "during", "what the layers keep of a micro-batch; of shards, one layer's whole parameters too"),
    ("logits", "during", "a chunk's logits, at most 2**26, their probabilities and the head's gradient"),
    ("workspace", "during", "a layer's gradients, recomputed activations and whole parameters"),
)


class Rehearsal(NamedTuple):
    """Bytes alive at points of the second micro-batch's pass, for a model of some layers."""

    held: Figures
    """The first five."""
    before: int
    """At the start: permanent memory, and gradients."""
    computed: int
    """After the computation of its layers, or for a model that is not trained, before."""
    early: int
    """The peak from the layers' first activation to the first of their gradients, beyond `computed`."""
    head: int
    """As `early`, in the head."""
    late: int = 0
    """The peak after that, beyond `before`."""

    def deeper(self, layers: float, deep: "Rehearsal", shallow: "Rehearsal") -> "Rehearsal":
        """Extrapolate to `layers` more layers. Each makes `deep` of `shallow`."""

        def grown(own: int, one: int, other: int) -> int:
            return own + int(layers * (one - other))

        held = Figures(*map(grown, self.held, deep.held, shallow.held))._replace(gathered=self.held.gathered)
        before = grown(self.before, deep.before, shallow.before)
        return self._replace(held=held, before=before, computed=grown(self.computed, deep.computed, shallow.computed))

    def figures(self) -> Figures:
        """Divide the peak."""
        kept = self.computed - self.before
        workspace = max(0, max(self.early, self.late - kept) - self.head)
        return self.held._replace(activations=kept - self.held.gathered, head=self.head, workspace=workspace)


def rehearse(
    live: LiveBytes, held: Figures, body: nn.Module, last: nn.Module, passes: Iterable[Callable[[], None]], trains: bool
) -> tuple[Rehearsal, int]:
    """Run passes and measure the last one. `body` computes the states that the head reads. `last`: its last layer.

    Also returns the bytes that are alive at its start and were not before all passes, such as gradients.
    """
    most: dict[str, int] = dict.fromkeys(("body", "head", "layer", "rest"), 0)
    entered = computed = 0

    def note(part: str, *_: object) -> None:
        most[part] = max(most[part], live.peak())

    def enter_last(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        states = inputs[0] if inputs else cast("Tensor", named["hidden_states"])
        if states.requires_grad:
            states.register_hook(partial(note, "layer"))

    def enter_body(*_: object) -> None:
        nonlocal entered
        entered = live.now

    def leave_body(_: nn.Module, __: object, output: Any) -> None:
        nonlocal computed
        computed = live.now
        note("body")
        states = cast("Tensor", output if isinstance(output, Tensor) else output.last_hidden_state)
        if states.requires_grad:
            states.register_hook(partial(note, "head"))

    last.register_forward_pre_hook(enter_last, with_kwargs=True)
    body.register_forward_pre_hook(enter_body)
    body.register_forward_hook(leave_body)
    start = before = live.now
    for run in passes:
        before = live.now
        live.peak()
        most.update(dict.fromkeys(most, 0))
        run()
        note("rest")
    held = held._replace(gathered=min(held.gathered, entered - before))
    if not trains:
        computed = before + held.gathered
        peak = max(most.values()) - computed
        return Rehearsal(held, before, computed, peak, peak), before - start
    early, head = max(most["body"], most["head"], most["layer"]) - computed, max(0, most["head"] - computed)
    return Rehearsal(held, before, computed, early, head, most["rest"] - before), before - start


class GpuAttention(Packed):
    """Packed attention with the memory of a GPU kernel: no mask, and one number for each query and head.

    In float32 it is SDPA's, whose keys and values are repeated for each query head.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Return tensors of attention's shapes, and keep what its backward pass needs."""
        if not scores.plain:
            return super().__call__(layer, query, key, value, scores)
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
        if query.dtype == torch.float32:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return cast("Tensor", _Kernel.apply(q, k, v))[None]  # type: ignore[no-untyped-call]


class _Kernel(torch.autograd.Function):
    """Keeps what flash attention keeps. Inputs and outputs are [tokens, heads, dims]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.empty_like(q)
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors[:3]
        summed = q.new_empty(q.shape, dtype=torch.float32)  # the queries' gradient, summed over blocks of keys
        wide = [q.new_empty((len(k), *q.shape[1:])) for _ in (k, v)]  # for each query head, before they are summed
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del summed, wide
        return gradients


@contextmanager
def rehearsed_alone(rank: int, size: int) -> Generator[None]:
    """Simulate one rank of a group of this size. Results of the other ranks are there at once.

    ConfigError if the process is in a process group already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process is in a process group, and memory is estimated in a group whose other ranks are simulated: "
            "estimate it in a separate process, as `meshrl memory` does"
        )
    group = import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"
    dist.init_process_group("fake", store=group.FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
