"""Weights into vLLM's workers by vLLM's interface, layer by layer: from shared memory, a broadcast or files."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from meshrl_inference.engine_side.loading import Naming, read_broadcast, shared_tensors
from meshrl_inference.engine_side.protocol import Outcome, SharedBucket
from meshrl_torch.wire.manifest import Manifest
from meshrl_vllm import quantized
from meshrl_vllm.adapters import leave_rows_without
from meshrl_vllm.towers import in_tower
from meshrl_vllm.whole_logprobs import return_whole_logprobs

NAME: Final = "meshrl"
"""vLLM's name of the engine."""


@dataclass
class NoInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where new weights are."""

    buckets: list[SharedBucket]
    """Of weights in shared memory."""
    manifest: Manifest | None = None
    """Of the policy's ranks, if each worker reads their broadcast."""
    together: int = 1
    """Number of processes that read the broadcast at once."""


class Transfer(WeightTransferEngine[NoInfo, Update]):
    """Loads whole weights by their Hugging Face names. Those in shared memory were checked before."""

    init_info_cls = NoInfo
    update_info_cls = Update
    outcome = Outcome()
    """How the last broadcast was read."""

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Learn how a policy names the tensors, and which of them are in FP8."""
        self._naming = Naming(self.model_config.model)
        in_fp8 = self.vllm_config.load_config.load_format == quantized.NAME
        self._matrices = self._naming.matrices if in_fp8 else frozenset[str]()

    def start_weight_update(self) -> None:
        """Leave the model as it is until the first weights come."""
        self._begun = False

    def begin(self) -> None:
        """Start to load the model again, whatever was loaded before."""
        self.finish_weight_update()
        self._begun = True
        if current_platform.is_cpu():
            _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        """Load each tensor."""
        if update_info.manifest is not None:
            manifest, together = update_info.manifest, update_info.together
            self.outcome = read_broadcast(manifest, together, self._naming, self.device, self.begin, self._load)
            return
        self.begin()
        self._load(self._naming.in_files(shared_tensors(update_info.buckets)))

    def _load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by their names in files."""
        self.model.load_weights(quantized.in_fp8(in_tower(named, self.model), self._matrices, self.device))

    def finish_weight_update(self) -> None:
        """Put the weights where the kernels read them, if any were loaded."""
        if not self._begun:
            return
        self._begun = False
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing."""


class Extension:
    """Additional methods of vLLM's workers. vLLM imports this module there, which registers the engine."""

    model_runner: Any
    weight_transfer_engine: Any

    def return_whole_logprobs(self) -> None:
        """Return log-probs of the whole distribution, as a trainer does."""
        return_whole_logprobs(self.model_runner.sampler)

    def leave_rows_without(self) -> None:
        """Let rows without an adapter be as the model makes them, on CPUs too."""
        if current_platform.is_cpu():
            leave_rows_without()

    def broadcast_outcome(self) -> Outcome:
        """Return how this worker has read the last broadcast."""
        outcome: Outcome = self.weight_transfer_engine.outcome
        return outcome

    def take_folder(self, folder: str) -> None:
        """Load the tensors of a Hugging Face folder, between the beginning and the end of an update.

        ValueError, and nothing is loaded, if some are missing or have another shape than the model's.
        """
        engine = self.weight_transfer_engine
        files = sorted(Path(folder).glob("*.safetensors"))
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        for name, shape in Naming(engine.model_config.model).file_shapes().items():
            there = list(found[name].shape) if name in found else "missing"
            if there != shape:
                raise ValueError(f"`{name}` is {there} in {folder} and {shape} in the model that is served")
        engine.begin()
        engine.model.load_weights(in_tower(found.items(), engine.model))


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Drop CPU kernels of experts. They hold copies of the weights, which only a new kernel makes again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_tied_head(model: Any) -> None:
    """Update a copy of the tied head in a CPU kernel, which loading the embeddings leaves unchanged."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415 -- in CPU builds only

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


WeightTransferEngineFactory.register_engine(NAME, Transfer)
