"""AdamW with a warm-up, a schedule and clipping, in float32."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn

from meshrl.algo import Predicts
from meshrl.errors import ModelError
from meshrl.roles import OptimizerConfig, Step

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each element."""
_CAUSES: Final[Mapping[Predicts, str]] = {
    "logprobs": "infinite log-probs or advantages in the batch",
    "values": "infinite `returns` in the batch, or values that have grown too large",
    "scores": (
        "`margins`, `least_margins` or `labels` in the batch that are not finite, or scores that have grown too large "
        "(`centre` of BradleyTerryLoss holds them near 0)"
    ),
}


class Stepper(ABC):
    """An optimizer, as a step uses it."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.steps = 0
        """Steps so far."""

    def settings(self, chosen: Step | None = None) -> OptimizerConfig:
        """Return the values of the next step, whose `lr` is that of the schedule unless it is chosen."""
        return (chosen or Step()).over(self._config, learning_rate(self._config, self.steps))

    @abstractmethod
    def step(self, predicts: Predicts, settings: OptimizerConfig, scale: float = 1.0) -> float:
        """Multiply the gradients by `scale`, clip them, step, and drop them. Returns their norm before clipping.

        ModelError, and no step, if the norm is not finite. `predicts`: the model's prediction, for that message.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients."""


class Optimizer(Stepper):
    """Steps over the parameters of a model. Weight decay applies to matrices, not to vectors such as norms.

    Parameters narrower than float32 have float32 masters, and are rounded from these after each step: near 1 the next
    bfloat16 is 2**-7 away, and a step of 1e-5 would be lost. Gradients of micro-batches are summed in float32.

    Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Sequence[nn.Parameter],
        norm: Callable[[Sequence[Tensor]], Tensor] = nn.utils.get_total_norm,
    ) -> None:
        """`norm`: computes the whole gradient's norm from the gradients of these parameters, or of a rank's shards."""
        super().__init__(config)
        self._parameters = list(parameters)
        self.masters: Final = [_master(each) for each in self._parameters]
        """The float32 tensors that AdamW steps over: each of `parameters`, or a float32 copy of it."""
        self._norm = norm
        groups = [
            {"params": [each for each in self.masters if each.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [each for each in self.masters if each.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def step(self, predicts: Predicts, settings: OptimizerConfig, scale: float = 1.0) -> float:
        """Clip the gradients, step, and drop them. ModelError, and no step, if their norm is not finite."""
        gradients = [each.grad for each in self.masters if each.grad is not None]
        for gradient in gradients if scale != 1 else ():
            gradient.mul_(scale)
        total = self._norm(gradients)
        norm = float(total)
        if not math.isfinite(norm):
            self.forget()
            raise not_finite(predicts, norm, gradients, self.steps, settings.lr)
        if settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.masters, settings.max_grad_norm, total)
        for group in self._adamw.param_groups:
            decay = settings.weight_decay if group["params"][0].dim() >= 2 else 0.0
            group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
        self._adamw.step()
        self.round()
        self.forget()
        self.steps += 1
        return norm

    def forget(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def round(self) -> None:
        """Set the parameters to their masters, rounded."""
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    def moments(self, name: str) -> list[Tensor]:
        """Return AdamW's state of this name for each master, as views."""
        state = self._adamw.state  # a parameter without a gradient so far has none
        return [state[each][name] if each in state else torch.zeros_like(each) for each in self.masters]

    def counts(self) -> list[int]:
        """Return the number of steps of each master. Those without a gradient in some steps have fewer."""
        state, none = self._adamw.state, torch.zeros(())
        counts = [cast("Tensor", state[each]["step"] if each in state else none) for each in self.masters]
        return [int(count) for count in torch.stack([each.cpu() for each in counts]).tolist()] if counts else []

    def begin(self, steps: int, counts: Sequence[int]) -> None:
        """Set the number of steps, and that of each master, with moments to be filled in."""
        self.steps = steps
        for master, count in zip(self.masters, counts, strict=True):
            if not count:
                self._adamw.state.pop(master, None)
                continue
            state = self._adamw.state[master]
            # A separate `step` for each, because AdamW adds to it in place.
            state["step"] = torch.tensor(float(count), device=master.device)
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(master)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter if it is float32, else a float32 copy that receives each gradient of the parameter."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def gather(given: Tensor) -> None:
        gradient = cast("Tensor", given.grad).float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        given.grad = None

    parameter.register_post_accumulate_grad_hook(gather)
    return master


def not_finite(predicts: Predicts, norm: float, gradients: Sequence[Tensor], step: int, lr: float) -> ModelError:
    """Return the error for a gradient with such a norm."""
    worst = sum(not bool(gradient.isfinite().all()) for gradient in gradients)
    return ModelError(
        f"the gradient of step {step} is not finite: its norm is {norm}, in {worst} of {len(gradients)} tensors, at "
        f"learning rate {lr:.3g}. No step was made. Look for {_CAUSES[predicts]}, or lower optimizer.lr"
    )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate of step `step`, from 0: a linear warm-up, then the schedule down to zero at `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    left = (config.total_steps - step) / max(1, config.total_steps - config.warmup_steps)
    left = min(1.0, max(0.0, left))
    return config.lr * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
