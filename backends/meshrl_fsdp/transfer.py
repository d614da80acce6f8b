"""Whole weights into a model that is spread over the ranks."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshrl.mesh import Array
from meshrl.weights import Weights
from meshrl_fsdp.parts import local, rectangle
from meshrl_fsdp.sharded import Sharded
from meshrl_hf.transfer import Form, check_weights, copy_into


def take(sharded: Sharded, weights: Weights, dtype: str) -> None:
    """Copy weights, whole tensors of `dtype`, into a model's shards. All ranks call it together.

    ModelError on all ranks, and nothing is copied, if they are of another model or differ from the sent bytes.
    """
    sharded.reshard()
    own = sharded.saved
    forms = {name: Form(dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    sharded.world.agree(lambda: check_weights(forms, weights))
    with torch.no_grad():
        for name, tensor in own.items():
            _copy(tensor, weights.tensors[name])


def _copy(tensor: Tensor, whole: Array) -> None:
    if not isinstance(tensor, DTensor):
        copy_into(tensor.detach(), whole)
        return
    for box in rectangle("", tensor, local(tensor)):
        copy_into(box.tensor, whole[tuple(slice(start, end) for start, end in box.ranges)])
