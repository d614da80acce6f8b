"""Weights into vLLM's workers through vLLM's own interface: out of shared memory, and loaded layer by layer."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from meshrl_inference.naming import Naming
from meshrl_inference.tensors import Places, tensors
from meshrl_vllm.whole import tell_whole

NAME: Final = "meshrl"
"""What vLLM knows the engine as."""


@dataclass
class NoInfo(WeightTransferInitInfo):
    """There is nothing to agree on before."""


@dataclass
class Buckets(WeightTransferUpdateInfo):
    """Files in shared memory, and what lies where: name, dtype, shape, start in bytes."""

    buckets: Places


class SharedMemory(WeightTransferEngine[NoInfo, Buckets]):
    """Takes whole weights by their Hugging Face names. That they are right was checked before."""

    init_info_cls = NoInfo
    update_info_cls = Buckets

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Learn how a policy names the tensors."""
        self._naming = Naming(self.model_config.model)

    def start_weight_update(self) -> None:
        """Begin to read the model anew."""
        if current_platform.is_cpu():
            _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Buckets) -> None:
        """Load each tensor."""
        self.model.load_weights(self._naming.in_files(tensors(update_info.buckets)))

    def finish_weight_update(self) -> None:
        """Put the weights where the kernels read them."""
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


class Extension:
    """What each of vLLM's workers is beside: vLLM imports this module there, and so it knows the engine."""

    model_runner: Any

    def tell_whole(self) -> None:
        """Log-probs are to be of the whole distribution, as a trainer's are."""
        tell_whole(self.model_runner.sampler)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """On a CPU the kernels of experts have copies of their own, which are made with them, and by a reload only then."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_tied_head(model: Any) -> None:
    """On a CPU the head's kernel has a copy of its own, which a reload of the embeddings that it is tied to leaves."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415 -- of CPU builds alone

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


WeightTransferEngineFactory.register_engine(NAME, SharedMemory)
