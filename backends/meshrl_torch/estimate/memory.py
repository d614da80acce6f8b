"""The memory of a model on a rank, from a rehearsal of its passes with tensors that have shapes but no memory."""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshrl.data import Batch, Ragged
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import (
    CriticConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    Term,
    Work,
)
from meshrl_torch.estimate.live_bytes import Live
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.loading import GENERATOR, Kind, config_of, quiet, unreadable
from meshrl_torch.model.lora import prepare, trained
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.packing import MicroBatch, Rows, learned, micro_batches, whole
from meshrl_torch.model.scoring import Predict, predicted
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.model.value_head import with_head
from meshrl_torch.train.reward_training import kind_of, with_score

fake: Final = import_module("torch._subclasses.fake_tensor")  # torch has no public name for it

DEPTHS: Final = (2, 3)
"""Numbers of layers of the rehearsed models. Each further layer needs as much as the third."""


@dataclass(frozen=True)
class Part:
    """The computations of a role with a model, and its trained parameters."""

    model: LanguageModel
    predict: Predict
    extra: Sequence[nn.Module] = ()
    """Heads in addition to the model."""
    parameters: Callable[[], Sequence[nn.Parameter]] | None = None
    """Returns the trained parameters, once they are in place. None if nothing is trained."""


@dataclass(frozen=True)
class Cast:
    """A part in a backend's layout on a rank, on the device `meta`."""

    root: nn.Module
    """The module with all parameters."""
    predict: Predict
    steps_over: Callable[[], Sequence[Tensor]] | None = None
    """Makes an optimizer, and returns the tensors that it steps over. None for a model that is not trained."""
    gathered: int = 0
    """Bytes of parameters that are whole during an entire pass, in addition to their shards."""


def part_of(config: ModelConfig, model: LanguageModel) -> Part:
    """Return what a table's role does with a model. ConfigError if its role has no model."""
    if isinstance(config, PolicyConfig):
        prepare(model, config)
        return Part(model, partial(predicted, model), parameters=lambda: list(trained(model).values()))
    if isinstance(config, CriticConfig):
        valued = with_head(model, config)
        return Part(model, valued.predicted, [valued.head], lambda: list(valued.parameters.values()))
    if isinstance(config, RewardModelConfig | RewardTrainingConfig):
        judge = with_score(model, config)
        learns = isinstance(config, RewardTrainingConfig)
        return Part(
            judge.model, judge.predicted, parameters=(lambda: list(trained(judge.model).values())) if learns else None
        )
    if isinstance(config, ReferenceConfig):
        return Part(model, partial(predicted, model))
    raise ConfigError(f"a {type(config).__name__} is not the table of a role whose memory is known")


def knobs(config: ModelConfig) -> list[str]:
    """List the settings of a role, the same for all backends, that would reduce its memory."""
    found: list[str] = []
    if isinstance(config, PolicyConfig) and not config.activation_checkpointing:
        found.append("activation_checkpointing=true")
    budget: object = getattr(config, "micro_batch_tokens", 1)
    if isinstance(budget, int) and budget > 1:
        found.append(f"micro_batch_tokens={budget // 2}")
    if config.dtype == "float32":
        found.append("dtype=bfloat16")
    return found


class Figures(NamedTuple):
    """Bytes that a rank holds of a model."""

    parameters: int
    masters: int
    moments: int
    gradients: int
    gathered: int
    activations: int
    head: int
    """The peak beyond these while the head and its gradient are computed."""
    workspace: int
    """What the rest of the pass needs beyond that."""

    def terms(self, during: str, *, host: bool) -> list[Term]:
        """Return the figures that are not 0, with their formulas."""
        return [
            Term(name, size, when and during, text, host)
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


def depth_of(shape: PretrainedConfig) -> int:
    """Return the number of layers."""
    return int(shape.get_text_config().num_hidden_layers)


def cache_per_token(shape: PretrainedConfig, dtype: str, tp: int = 1) -> int:
    """Bytes of a token's keys and values in all layers, on one rank along tp. `shape`: the text model's."""
    heads = int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads)
    dims = int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    itemsize = cast("torch.dtype", getattr(torch, dtype)).itemsize
    return 2 * int(shape.num_hidden_layers) * max(1, heads // tp) * dims * itemsize


def figures(config: ModelConfig, work: Work, budget: int, lay_out: Callable[[LanguageModel], Cast]) -> Figures:
    """Compute the figures of the rank that holds the most of a role's model. Micro-batches have `budget` tokens.

    `lay_out` places a model on a rank. The other ranks do not exist. A model of more than three equal layers is
    rehearsed with two and with three, and their difference counts for each further layer.
    """
    shape = config_of(config)
    kind = kind_of(config) if isinstance(config, RewardModelConfig | RewardTrainingConfig) else GENERATOR
    layers = depth_of(shape)
    trains = isinstance(config, PolicyConfig | CriticConfig | RewardTrainingConfig)
    passes = [_micro_batch(work, tokens, trains=trains) for tokens in (1, budget)]
    attention = OnGpu if work.gpu else Packed
    rehearsed: list[Rehearsal] = []
    for depth in DEPTHS if layers > max(DEPTHS) else (layers,):
        model = skeleton_of(config, shape, kind, depth)
        fresh = [  # it keeps what it computed
            (batch, replace(micro, attend=attention(micro.attend.groups, micro.attend.keys))) for batch, micro in passes
        ]
        try:
            rehearsed.append(_rehearse(model, lay_out(model), fresh))
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException) as error:
            raise ModelError(
                f"{type(model.network).__name__} takes a different amount of memory for other values ({error.func}), "
                "as mixtures of experts do: its memory is unknown before a run"
            ) from error
    last = rehearsed[-1]
    if len(rehearsed) > 1:
        last = last.deeper(rehearsed[0], layers - max(DEPTHS))
    return last.figures


def skeleton_of(config: ModelConfig, shape: PretrainedConfig, kind: Kind, depth: int) -> LanguageModel:
    """Make the first layers of a model, on the device `meta`. Its tokenizer is a placeholder."""
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    try:
        with quiet(), torch.device("meta"):
            network = cast("PreTrainedModel", kind.make(shape, dtype=dtype))
    except Exception as error:
        raise unreadable(str(config.model), kind, error) from error
    network.tie_weights()
    _shorten(network, depth)
    return ready(network, character_tokenizer("a", 8), None)


def _shorten(network: PreTrainedModel, depth: int) -> None:
    """Keep only the first layers of a model. ModelError if they differ in size."""
    names = cast("Sequence[str]", getattr(network, "_no_split_modules", None) or ())
    for parent in list(network.modules()):
        for name, layers in list(parent.named_children()):
            if not isinstance(layers, nn.ModuleList) or {type(each).__name__ for each in layers} - set(names):
                continue
            if len({tuple(each.shape for each in layer.parameters()) for layer in layers}) > 1:
                raise ModelError(
                    f"{type(network).__name__} has layers of different sizes, and memory is estimated from one layer: "
                    "how much it takes is not known"
                )
            setattr(parent, name, layers[:depth])


def longest_rows(work: Work, families: int, *, trains: bool) -> tuple[Batch, Rows, Ragged | None]:
    """Make rows of the longest prompt and completion in up to `families` families, and the tokens to read or learn."""
    count = min(work.own_rows, families * work.n)
    prompts = [np.full(work.prompt, row // work.n, np.int32) for row in range(count)]
    completions = [np.full(work.completion, row, np.int32) for row in range(count)]  # all begin differently
    tokens = Ragged.of(list(map(np.append, prompts, completions)), np.int32)
    mask = Ragged(np.tile(np.arange(work.tokens) >= work.prompt, count), tokens.offsets)
    rows, learn = (learned(tokens, mask), mask) if trains else (whole(tokens, mask), None)
    return Batch.of(tokens=tokens, loss_mask=mask), rows, learn


def _micro_batch(work: Work, budget: int, *, trains: bool) -> tuple[Batch, MicroBatch]:
    """Make the largest micro-batch of rows with the longest prompt and completion."""
    batch, rows, learn = longest_rows(work, budget // work.tokens + 2, trains=trains)
    return batch, max(micro_batches(batch.tokens, rows, learn, budget), key=lambda each: each.ids.numel())


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


@dataclass(frozen=True)
class Rehearsal:
    """Bytes alive at points of a pass, for a model of some layers."""

    figures: Figures
    before: int
    """At the start of the second micro-batch: permanent memory, and gradients."""
    computed: int
    """After the computation of its layers."""
    early: int
    """The peak from the layers' first activation to the first of their gradients, beyond `computed`."""
    late: int
    """The peak after that."""

    def deeper(self, shallow: "Rehearsal", layers: int) -> "Rehearsal":
        """Extrapolate to `layers` more layers. `shallow`: the rehearsal with one layer less."""
        grown = [one + layers * (one - other) for one, other in zip(self.figures, shallow.figures, strict=True)]
        named = Figures(*grown)._replace(head=self.figures.head, gathered=self.figures.gathered)
        before = self.before + layers * (self.before - shallow.before)
        computed = self.computed + layers * (self.computed - shallow.computed)
        late = self.late - self.before + before
        workspace = max(0, max(computed + self.early, late) - computed - named.head)
        return replace(self, figures=named._replace(workspace=workspace), before=before, computed=computed, late=late)


def _rehearse(model: LanguageModel, cast_: Cast, passes: Iterable[tuple[Batch, MicroBatch]]) -> Rehearsal:
    """Run two micro-batches and measure the second, at whose start gradients exist."""
    trains = cast_.steps_over is not None
    modes = fake.FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings()
    with modes[0], modes[1], Live() as live, nullcontext() if trains else torch.no_grad():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # FSDP compares it
        cast_.root.to_empty(device="cpu")
        model.network.tie_weights()
        parameters = live.now
        stepped = cast_.steps_over() if cast_.steps_over else ()
        masters = live.now - parameters
        moments = sum(2 * each.numel() * torch.float32.itemsize for each in stepped)
        held = before = live.now
        blocks = [each for each in model.network.modules() if isinstance(each, nn.ModuleList) and len(each)]
        marks = Marks(live, model.network.base_model, blocks[0][-1])
        for batch, micro in passes:
            before = live.now
            marks.begin()
            said = cast_.predict(batch, micro)
            if trains:
                said.sum().backward()
            del said
            marks.end()
    return marks.rehearsal(
        Figures(parameters, masters, moments, max(0, before - held), cast_.gathered, 0, 0, 0), before, trains=trains
    )


class Marks:
    """The peak in each part of a pass."""

    def __init__(self, live: Live, body: nn.Module, last: nn.Module) -> None:
        """`body`: computes the states that the head reads. `last`: its last layer."""
        self._live = live
        self._most: dict[str, int] = {}
        self._entered = self._computed = 0
        last.register_forward_pre_hook(self._enter_last, with_kwargs=True)
        body.register_forward_pre_hook(self._enter_body)
        body.register_forward_hook(self._leave_body)

    def begin(self) -> None:
        """Start a pass."""
        self._live.peak()
        self._most = dict.fromkeys(("body", "head", "layer", "rest"), 0)

    def end(self) -> None:
        """End the pass."""
        self._note("rest")

    def rehearsal(self, held: Figures, before: int, *, trains: bool) -> Rehearsal:
        """Return the measurements of the last pass. `before`: bytes that were alive at its start."""
        most, computed = self._most, self._computed
        gathered = min(held.gathered, self._entered - before)
        if not trains:
            head = max(most.values()) - before - gathered
            return Rehearsal(held._replace(gathered=gathered, head=head), before, before + gathered, head, 0)
        early = max(most["body"], most["head"], most["layer"]) - computed
        head = max(0, most["head"] - computed)
        workspace = max(0, max(computed + early, most["rest"]) - computed - head)
        kept = computed - before - gathered
        found = held._replace(gathered=gathered, activations=kept, head=head, workspace=workspace)
        return Rehearsal(found, before, computed, early, most["rest"])

    def _enter_last(self, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        states = inputs[0] if inputs else cast("Tensor", named["hidden_states"])
        if states.requires_grad:
            states.register_hook(lambda _: self._note("layer"))

    def _enter_body(self, _: nn.Module, __: object) -> None:
        self._entered = self._live.now

    def _leave_body(self, _: nn.Module, __: object, output: Any) -> None:
        self._computed = self._live.now
        self._note("body")
        states = cast("Tensor", output if isinstance(output, Tensor) else output.last_hidden_state)
        if states.requires_grad:
            states.register_hook(lambda _: self._note("head"))

    def _note(self, part: str) -> None:
        self._most[part] = max(self._most[part], self._live.peak())


class OnGpu(Packed):
    """Packed attention with the memory of a GPU kernel: no mask, and one number for each query and head."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Return tensors of attention's shapes, and keep what its backward pass needs."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if self.keys is not None:
            k, v = k.index_select(0, self.keys), v.index_select(0, self.keys)
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
        made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del summed, wide
        return made
