"""AdamW in Megatron's distributed optimizer: of ranks that share parameters, each steps over a part of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.roles import OptimizerConfig
from meshrl_megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ProcessGroupCollection,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_megatron_optimizer,
    quiet,
)
from meshrl_megatron.core import OptimizerConfig as MegatronOptimizerConfig
from meshrl_megatron.model import Model
from meshrl_megatron.naming import Piece
from meshrl_torch.checkpoint.spread_state import MOMENTS
from meshrl_torch.train.optimizer import learning_rate, not_finite


def gradient_layout() -> DistributedDataParallelConfig:
    """Return Megatron's settings: gradients are summed in float32, and each rank steps over a range of them."""
    return DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)


class Trained:
    """A model's stages with their gradients, moments and number of steps."""

    def __init__(self, config: OptimizerConfig, model: Model) -> None:
        self.steps = 0
        self._config, self._model = config, model
        self._held: Final = {f"{each.first_layer}/{each.name}": each for each in model.held}
        kept = gradient_layout()
        self.stages: Final = [
            DistributedDataParallel(model.config, kept, stage, pg_collection=model.world.groups)
            for stage in model.stages
        ]
        model.config.finalize_model_grads_func = self._finalize
        told = MegatronOptimizerConfig(
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
        self._optimizer = get_megatron_optimizer(
            told, self.stages, use_gloo_process_groups=False, pg_collection=model.world.groups
        )
        for group in self._optimizer.param_groups:  # Megatron leaves it to its scheduler
            group["weight_decay"] = config.weight_decay * cast("float", group["wd_mult"])

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self._config, self.steps)

    def forget(self) -> None:
        """Set the gradients to 0."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        for shard in self._shards():
            shard.grad = None

    def step(self, predicts: Predicts) -> float:
        """Clip the gradients, step, and drop them. Returns the gradients' norm before clipping.

        ModelError on all ranks, and no step, if the norm is not finite. `predicts`: for the message.
        """
        with quiet():
            return self._step(predicts)

    def _step(self, predicts: Predicts) -> float:
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            gradients = [each.grad for each in self._shards() if each.grad is not None]
            failure = not_finite(predicts, norm, gradients, self.steps, self.lr)
            self.forget()
            raise failure
        most = self._config.max_grad_norm
        if most is not None:
            for each in self._optimizer.chained_optimizers:
                if shards := list(_shards(each.optimizer)):
                    clip_grad_by_total_norm_fp32(shards, max_norm=most, total_norm=norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
        self._optimizer.step_with_ready_grads()
        self.forget()
        self.steps += 1
        return norm

    def _shards(self) -> Iterator[nn.Parameter]:
        for each in self._optimizer.chained_optimizers:
            yield from _shards(each.optimizer)

    def _finalize(
        self,
        stages: list[nn.Module],
        tokens: Tensor | None,
        pg_collection: ProcessGroupCollection | None,
        force_all_reduce: bool | None,
    ) -> None:
        """Sum the gradients over the ranks, without a division: losses are of the global batch."""
        finalize_model_grads(stages, None, pg_collection, force_all_reduce)

    # The following members are for checkpoints.

    def names(self) -> Sequence[str]:
        """Return the names of this rank's parameters, in an order that all ranks of its stage share."""
        return list(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape on this rank."""
        return tuple(self._held[name].parameter.shape)

    def pieces(self, name: str) -> list[Piece]:
        """Return its place in Hugging Face's tensors."""
        return self._model.pieces(self._held[name])

    def is_writer(self, name: str) -> bool:
        """True if this rank writes it. Of ranks with the same part, exactly one does."""
        return self._model.tells(self._held[name])

    def parameter(self, name: str) -> Tensor:
        """Return the trained values, float32. Ranks that share it call it together."""
        return self._whole(name, "parameter")

    def moments(self, name: str) -> Mapping[str, Tensor]:
        """Return AdamW's moments of it, float32. Ranks that share it call it together."""
        return {kind: self._whole(name, kind) for kind in MOMENTS}

    def _whole(self, name: str, kind: str) -> Tensor:
        held = self._held[name]
        parameter = held.parameter
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own := self._range(parameter):
            whole[own.start : own.end] = own.kept(kind).view(-1)
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

    def take(self, name: str, kind: str, tensor: Tensor) -> None:
        """Set the trained values ("parameter") or a moment from a tensor of the parameter's shape, on this rank."""
        parameter = self._held[name].parameter
        if kind == "parameter":
            parameter.data.copy_(tensor)
        if own := self._range(parameter):
            own.kept(kind).view(-1).copy_(tensor.view(-1)[own.start : own.end])

    def _range(self, parameter: nn.Parameter) -> "_Range | None":
        """Return this rank's range of a parameter, if any."""
        for each in self._optimizer.chained_optimizers:
            if parameter in each.model_param_group_index_map:
                group, order = each.model_param_group_index_map[parameter]
                shard = each.optimizer.param_groups[group]["params"][order]
                there = each._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 -- Megatron has no other
                return _Range(shard, each.optimizer.state[shard], there.start, there.end)
        return None


class _Range(NamedTuple):
    """A range of a parameter's elements. One of the ranks that share the parameter steps over it."""

    shard: nn.Parameter
    """The elements, float32."""
    state: Mapping[str, Tensor]
    """AdamW's state of them."""
    start: int
    end: int

    def kept(self, kind: str) -> Tensor:
        """Return the elements ("parameter") or a moment of them."""
        return self.shard.detach() if kind == "parameter" else self.state[kind]


def _shards(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield this rank's ranges of the parameters."""
    for group in optimizer.param_groups:
        yield from cast("Sequence[nn.Parameter]", group["params"])
