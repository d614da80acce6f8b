"""AdamW in Megatron's distributed optimizer, and its checkpoint. Ranks that share parameters step over a part each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.errors import ModelError
from meshrl.roles import OptimizerConfig
from meshrl_megatron import core
from meshrl_megatron.model import Model, StageParameter
from meshrl_torch.checkpoint.boxes import Box, Boxes
from meshrl_torch.checkpoint.state import MODEL, ModelFacts, State
from meshrl_torch.train.optimizer import MOMENTS, Stepper, not_finite


def gradient_layout() -> core.DistributedDataParallelConfig:
    """Return Megatron's settings: gradients are summed in float32, and each rank steps over a range of them."""
    return core.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)


class MegatronOptimizer(Stepper):
    """A model's stages with their gradients, moments and number of steps."""

    def __init__(self, config: OptimizerConfig, model: Model) -> None:
        super().__init__(config)
        self._model = model
        self.stages: Final = [
            core.DistributedDataParallel(model.config, gradient_layout(), stage, pg_collection=model.world.groups)
            for stage in model.stages
        ]
        settings = core.OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=0.0,  # done here, once the norm is known to be finite
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        with core.quiet():
            self._optimizer = core.get_megatron_optimizer(
                settings, self.stages, use_gloo_process_groups=False, pg_collection=model.world.groups
            )

    def forget(self) -> None:
        """Set the gradients to 0."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        for shard in self._shards():
            shard.grad = None

    def step(self, predicts: Predicts, settings: OptimizerConfig, scale: float = 1.0) -> float:
        """Sum the gradients over the ranks and make a step like the base. All ranks call it together."""
        with core.quiet():
            # Once for all passes of a step, and without a division by tokens: losses are of the global batch.
            core.finalize_model_grads(self.stages, None, pg_collection=self._model.world.groups)
            if scale != 1:
                for stage in self.stages:
                    stage.scale_gradients(scale)
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if not math.isfinite(norm):
                gradients = [each.grad for each in self._shards() if each.grad is not None]
                failure = not_finite(predicts, norm, gradients, self.steps, settings.lr)
                self.forget()
                raise failure
            most = settings.max_grad_norm
            if most is not None:
                for each in self._optimizer.chained_optimizers:
                    if shards := list(_shards(each.optimizer)):
                        core.clip_grad_by_total_norm_fp32(shards, max_norm=most, total_norm=norm)
            for group in self._optimizer.param_groups:
                decay = settings.weight_decay * cast("float", group["wd_mult"])
                group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
            self._optimizer.step_with_ready_grads()
            self.forget()
            self.steps += 1
            return norm

    def _shards(self) -> Iterator[nn.Parameter]:
        for each in self._optimizer.chained_optimizers:
            yield from _shards(each.optimizer)

    def whole(self, held: StageParameter, kind: str) -> Tensor:
        """Return a parameter's trained values (MODEL) or a moment of it, float32. Ranks that share it call together."""
        parameter = held.parameter
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own := self._range(parameter):
            whole[own.start : own.end] = own.values(kind).view(-1)
        dist.all_reduce(whole, group=self._model.sharing(held))
        return whole.view(parameter.shape)

    def begin(self, steps: int) -> None:
        """Set the number of steps, before moments are loaded. After 0 steps there are none."""
        self.steps = steps
        for each in self._optimizer.chained_optimizers:
            each.optimizer.state.clear()
            for shard in _shards(each.optimizer) if steps else ():
                moments = {name: torch.zeros_like(shard) for name in MOMENTS}
                # A separate step, because AdamW adds to it in place.
                each.optimizer.state[shard] = {"step": torch.tensor(float(steps)), **moments}

    def take(self, held: StageParameter, kind: str, tensor: Tensor) -> None:
        """Set the trained values (MODEL) or a moment from a tensor of the parameter's shape, on this rank."""
        parameter = held.parameter
        if kind == MODEL:
            parameter.data.copy_(tensor)
        if own := self._range(parameter):
            own.values(kind).view(-1).copy_(tensor.view(-1)[own.start : own.end])

    def _range(self, parameter: nn.Parameter) -> "_Range | None":
        """Return this rank's range of a parameter, if any."""
        return self._ranges.get(parameter)

    @cached_property
    def _ranges(self) -> Mapping[nn.Parameter, "_Range"]:
        ranges: dict[nn.Parameter, _Range] = {}
        for each in self._optimizer.chained_optimizers:
            # Not by `model_param_group_index_map`, which is wrong where float32 parameters follow narrower ones.
            for parameters, shards in (
                (each.model_fp32_groups, each.shard_fp32_groups),
                (each.model_float16_groups, each.shard_fp32_from_float16_groups),
            ):
                for parameter, shard in zip(chain(*parameters), chain(*shards), strict=True):
                    span = each._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 -- Megatron has no other
                    ranges[parameter] = _Range(shard, each.optimizer.state, span.start, span.end)
        return ranges


class _Range(NamedTuple):
    """A range of a parameter's elements. One of the ranks that share the parameter steps over it."""

    shard: nn.Parameter
    """The elements, float32."""
    state: Mapping[Tensor, Mapping[str, Tensor]]
    """AdamW's state of all elements, by shard."""
    start: int
    end: int

    def values(self, kind: str) -> Tensor:
        """Return the elements (MODEL) or a moment of them."""
        return self.shard.detach() if kind == MODEL else self.state[self.shard][kind]


def _shards(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield this rank's ranges of the parameters."""
    for group in optimizer.param_groups:
        yield from cast("Sequence[nn.Parameter]", group["params"])


class MegatronState(State):
    """The checkpoint of a model in training, whose parameters Megatron-Core fuses and splits."""

    def __init__(self, role: str, optimizer: MegatronOptimizer, model: Model, body: str = "model") -> None:
        """`body`: prefix of the decoder's tensors. Other backends write "body" for a critic."""
        super().__init__(role, model.world, optimizer)
        self._optimizer, self._model, self._body = optimizer, model, body

    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        boxes = (box for held in self._model.trained for box in self._model.boxes(held, held.parameter))
        return {self._filed(box.name): box.size for box in boxes}

    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterator[Box]:
        for held in self._model.trained:
            tensors = {kind: self._optimizer.whole(held, kind) for kind in kinds}
            if self._model.publishes(held):
                for kind, tensor in tensors.items():
                    yield from self._boxes(kind, held, tensor.detach().to("cpu", copy=copied))

    def _begin(self, facts: ModelFacts) -> None:
        if facts.late:
            name, steps = next(iter(facts.late.items()))
            raise ModelError(
                f"it made {steps} of its {facts.steps} steps with `{name}`, which had no gradient in the "
                "others, and Megatron steps over all parameters together: resume with the backend that wrote it"
            )
        self._optimizer.begin(facts.steps)

    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        """Load parameter by parameter, so that only one is held in addition to the model. Padding becomes 0."""
        for held in self._model.trained:
            read = {kind: torch.zeros(tuple(held.parameter.shape)) for kind in kinds}
            boxes.read(box for kind, tensor in read.items() for box in self._boxes(kind, held, tensor))
            for kind, tensor in read.items():
                self._optimizer.take(held, kind, tensor)

    def _boxes(self, kind: str, held: StageParameter, tensor: Tensor) -> Iterator[Box]:
        for box in self._model.boxes(held, tensor):
            yield replace(box, name=f"{kind}/{self._filed(box.name)}")

    def _filed(self, name: str) -> str:
        return f"{self._body}.{name.removeprefix('model.')}" if name.startswith("model.") else name
