"""A model's stages on this rank: built, filled from files, and converted to Hugging Face's names."""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.mesh import Rank
from meshrl.roles import ModelConfig, PolicyConfig, options_of
from meshrl_megatron.core import TransformerConfig, quiet
from meshrl_megatron.layers import modules_of
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.shape import Decoder, Place, boxes_of, reads
from meshrl_megatron.stage import Stage, stages_of
from meshrl_megatron.world import World
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.attention import Kernel, chosen
from meshrl_torch.model.files import ModelFiles
from meshrl_torch.model.heads import kind_of, predicts_of, value_head, with_score
from meshrl_torch.model.loading import CLASSIFIER, load, outline
from meshrl_torch.model.network import LanguageModel

_EXPERT: Final = ".local_experts."
_LM_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True)
class StageParameter:
    """A parameter of a stage."""

    name: str
    """Its name in the stage."""
    parameter: nn.Parameter
    first_layer: int
    """The number of its stage's first layer."""
    is_split: bool
    """True if ranks along tp have different parts."""
    is_copy: bool
    """True if another stage publishes it: the embeddings, which the last stage has too."""

    @property
    def is_expert(self) -> bool:
        """True if it belongs to one of a layer's experts, which neighbours along dp may divide among them."""
        return _EXPERT in self.name

    @property
    def tensor(self) -> tuple[int, str]:
        """A key of the tensor that contains it, the same for all experts of a layer."""
        layer, is_expert, expert = self.name.partition(_EXPERT)
        return self.first_layer, layer + expert.partition(".")[2] if is_expert else layer


@dataclass(frozen=True)
class Model:
    """The part of a model that this rank computes."""

    words: LanguageModel
    """The whole model without values, for its tokenizer and checks. For a reward model, a sequence classifier."""
    shape: Decoder
    config: TransformerConfig
    world: World
    stages: Sequence[Stage]
    predicts: Predicts
    unused: Callable[[], Mapping[str, Tensor]]
    """Tensors that no stage computes with, and that are saved with the model: a critic's language head."""

    @cached_property
    def held(self) -> Sequence[StageParameter]:
        """The parameters of this rank's stages."""
        return [
            StageParameter(
                name,
                parameter,
                stage.first_layer,
                bool(getattr(parameter, "tensor_model_parallel", False)),
                name == "output_layer.weight" and self.shape.tied,
            )
            for stage in self.stages
            for name, parameter in stage.named_parameters()
        ]

    @property
    def trained(self) -> Iterator[StageParameter]:
        """Those that an optimizer steps over: all but the biases of a router's choice."""
        return (held for held in self.held if held.parameter.requires_grad)

    def dividing(self, held: StageParameter) -> dist.ProcessGroup:
        """The ranks that divide a parameter's tensor among them: those along tp, or along ep for experts."""
        return self.world.groups.ep if held.is_expert else self.world.groups.tp

    def sharing(self, held: StageParameter) -> dist.ProcessGroup:
        """The ranks with the same part of a parameter, whose gradients are summed."""
        return self.world.groups.expt_dp if held.is_expert else self.world.groups.dp_cp

    def boxes(self, held: StageParameter, tensor: Tensor, rank: int | None = None) -> list[Box]:
        """Return a parameter's parts of Hugging Face tensors, as views of a tensor of the parameter's shape.

        `rank`: another one of `dividing`.
        """
        group = self.dividing(held)
        rank = group.rank() if rank is None else rank
        if held.is_expert:
            place = Place(0, 1, held.first_layer, rank * self.shape.experts // group.size())
        else:
            place = Place(rank, group.size(), held.first_layer)
        return boxes_of(held.name, self.shape, place, tensor)

    def publishes(self, held: StageParameter) -> bool:
        """True if this rank publishes its part of a parameter. Of ranks with the same part, one does."""
        alone = held.is_split or self.world.grid.place["tp"] == 0
        return alone and self._keeps(held)

    def shards(self) -> Iterator[Box]:
        """Yield the parts that this rank publishes, as views, and gather nothing. No other rank has them too."""
        return (box for held in self.held if self.publishes(held) for box in self.boxes(held, held.parameter))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share of the model's tensors, each whole, gathered one parameter after another.

        All ranks call it together. Between them they yield each tensor once, except unused ones.
        """
        for number, together in enumerate(self._together):
            if not self._keeps(together[0]):
                continue
            group, whole = self.dividing(together[0]), dict[str, Tensor]()
            for held in together:
                parts = self._gathered(held)
                if number % group.size() == group.rank():
                    self._assemble(held, parts, whole)
            yield from whole.items()

    def _keeps(self, held: StageParameter) -> bool:
        """True if this rank's place along dp and cp is one of those that publish a parameter."""
        place = self.world.grid.place["dp"], self.world.grid.place["cp"]
        return not held.is_copy and place in self._keepers[held.tensor]

    @cached_property
    def _together(self) -> Sequence[Sequence[StageParameter]]:
        """The parameters, grouped by tensor: one tensor holds all experts of a layer."""
        groups: dict[tuple[int, str], list[StageParameter]] = {}
        for held in self.held:
            groups.setdefault(held.tensor, []).append(held)
        return list(groups.values())

    @cached_property
    def _keepers(self) -> Mapping[tuple[int, str], Container[tuple[int, int]]]:
        """The places along dp and cp that publish each group of `_together`, with about as many numbers each."""
        grid = self.world.grid
        loads = dict.fromkeys(product(range(grid.sizes["dp"]), range(grid.sizes["cp"])), 0)
        keepers: dict[tuple[int, str], Container[tuple[int, int]]] = {}
        for each in self._together:
            span = grid.experts if each[0].is_expert else 1
            first, cp = min((place for place in loads if place[0] % span == 0), key=lambda place: loads[place])
            keepers[each[0].tensor] = places = [(first + number, cp) for number in range(span)]
            for place in places:
                loads[place] += sum(held.parameter.numel() for held in each)
        return keepers

    def _gathered(self, held: StageParameter) -> Sequence[Tensor]:
        """Return the parts of a parameter from all ranks that divide it."""
        own, group = held.parameter.detach(), self.dividing(held)
        if group.size() == 1 or not (held.is_split or held.is_expert):
            return [own]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return parts

    def _assemble(self, held: StageParameter, parts: Sequence[Tensor], whole: dict[str, Tensor]) -> None:
        for rank, part in enumerate(parts):
            for box in self.boxes(held, part, rank):
                if box.name not in whole:
                    whole[box.name] = torch.empty(box.size, dtype=part.dtype, device=part.device)
                whole[box.name][slices_of(box)].copy_(box.tensor)


def build(config: ModelConfig, rank: Rank) -> Model:
    """Build the model in a role's table on the ranks of its mesh, which call it together.

    A critic's or a reward model's head replaces the model's own. Errors are raised on all ranks: ConfigError if it
    cannot be divided over the mesh, ModelError if it cannot be read or its architecture is unknown.
    """
    predicts = predicts_of(config)
    recompute = isinstance(config, PolicyConfig) and config.activation_checkpointing
    layout = options_of(config, MegatronConfig)
    world = World.of(rank, layout.virtual_stages, layout.experts)
    dtype = cast("torch.dtype", getattr(torch, config.dtype))

    def read() -> tuple[_Source, Decoder]:
        source = _Source.of(config, predicts, chosen(layout.attention, world.device))
        shape = Decoder.of(source.words.network.config.get_text_config(), predicts)
        shape.check(world.grid.sizes, layout)
        modules_of(layout.transformer_impl)
        return source, shape

    source, shape = world.together(read)
    with quiet():
        settings = shape.configuration(world.grid.sizes, dtype, layout, recompute=recompute)
        rotary = nn.Module.to(source.rotary, world.device)
        stages = stages_of(shape, settings, world.groups, world.grid, rotary, layout.virtual_stages, predicts)
    tied = bool(source.words.network.config.get_text_config().tie_word_embeddings)
    unused = source.later(_LM_HEAD) if predicts == "values" and not tied else dict
    model = Model(source.words, shape, settings, world, stages, predicts, unused)
    world.agree(lambda: _fill(model, source))
    return model


class _Source(NamedTuple):
    """The place of a model's values."""

    words: LanguageModel
    rotary: nn.Module
    tensors: Mapping[str, Tensor] | None
    """In memory, whole. None: in files."""
    files: ModelFiles | None
    head: Mapping[str, Tensor]
    """A head of one number, by its name in a stage, if it is not among the others."""

    @classmethod
    def of(cls, config: ModelConfig, predicts: Predicts, kernel: Kernel | None) -> "_Source":
        reads(config)
        whole = config.model_copy(update={"dtype": "float32"})
        kind = kind_of(whole)
        words, files = outline(whole, kind) or (load(whole, kind), None)
        rotary = copy.deepcopy(cast("nn.Module", words.network.base_model.rotary_emb))
        head: dict[str, Tensor] = {}
        if predicts == "values":
            head = value_head(words, config).state_dict(prefix="value_head.")
        elif predicts == "scores":
            judge = with_score(words, config)
            words = judge.model
            if kind is not CLASSIFIER:
                head = judge.head.state_dict(prefix="score.")
        tensors = None if files else dict(words.tensors())
        nn.Module.to(words.network, "meta")
        return cls(replace(words, kernel=kernel), rotary, tensors, files, head)

    def later(self, name: str) -> Callable[[], Mapping[str, Tensor]]:
        """Return a function that reads one tensor, whole, when it is called, and keeps no other."""
        if self.tensors is not None:
            return partial(dict, {name: self.tensors[name]})
        files = cast("ModelFiles", self.files)
        return lambda: {name: files.whole(name)}


def _fill(model: Model, source: _Source) -> None:
    """Set the parameters' values. Each rank reads only its parts of files."""
    body = [held for held in model.held if held.name not in source.head]
    with torch.no_grad():
        for held in model.held:  # zeros are beyond the vocabulary
            held.parameter.copy_(source.head.get(held.name, torch.zeros(())))
    boxes = (box for held in body for box in model.boxes(held, held.parameter))
    if source.files is not None:
        source.files.read(boxes)
        return
    with torch.no_grad():
        for box in boxes:
            box.tensor.copy_((source.tensors or {})[box.name][slices_of(box)])


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return the place of a box in its whole tensor."""
    return tuple(slice(start, end) for start, end in box.ranges)
