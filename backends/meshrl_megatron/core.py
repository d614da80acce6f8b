"""Megatron-Core for this backend: all of its modules import it from here, in a form that runs on this machine.

Importing this module imports `megatron.core`, on a machine without a GPU in its CPU form. It silences warnings about
unused libraries, and sets the two globals that Megatron-Core reads. What differs between its versions is here too.

Raises BackendError for a version that this backend was not tested with, or without triton if the version needs it.
"""

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

import torch
from packaging.version import Version

from meshrl.errors import BackendError
from meshrl_megatron import cpu

PROVED: Final = Version("0.16.1"), Version("0.20")
"""The first release of megatron-core that this backend takes, and the first that it does not. The backend uses more
than its public names."""

if not PROVED[0] <= (installed := Version(version("megatron-core"))) < PROVED[1]:
    raise BackendError(
        f"megatron-core {installed} is installed, but meshrl_megatron takes {PROVED[0]} to before {PROVED[1]}: "
        f"pip install 'megatron-core>={PROVED[0]},<{PROVED[1]}'"
    )
if installed >= Version("0.18") and find_spec("triton") is None:
    raise BackendError(
        f"megatron-core {installed} imports triton, on CPUs too, and it is not installed: pip install triton"
    )
cpu.install()

_KNOWN: Final = (
    ("Transformer Engine and Apex are not installed", UserWarning),
    ("Apex is not installed", UserWarning),
    ("The following imports from `dynamic_context.py`", DeprecationWarning),
    ("`torch.jit.script", DeprecationWarning),
    ("full scope is deprecated", UserWarning),
    ("MLP requires ffn_hidden_size", DeprecationWarning),
    ("Using a large number of experts", UserWarning),
    ("MimoModelConfig is experimental", UserWarning),
    ("`sequence_parallel` is set to `True`, but tensor model parallel size is 1", UserWarning),
    ("`hidden_size` arg has been renamed to `normalized_shape`", DeprecationWarning),
    ("The .grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
    (r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning),
)
"""Beginnings of warnings by Megatron-Core, or by torch because of it, that its callers cannot avoid."""

_OF_A_GPU: Final = (
    ("When using sequence parallelism it is recommended", UserWarning),
    ("When using async grad allreduce it is recommended", UserWarning),
)
"""Advice about CUDA's queues, which is useless without a GPU."""


@contextmanager
def quiet() -> Generator[None]:
    """Silence Megatron-Core's known warnings while it is imported, built or run.

    Filters belong to the process: if two threads are in here, the one that leaves last decides.
    """
    with warnings.catch_warnings():
        for message, category in (*_KNOWN, *(() if torch.cuda.is_available() else _OF_A_GPU)):
            warnings.filterwarnings("ignore", message, category)
        yield


with quiet():
    from megatron.core import optimizer as _optimizers
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel as DistributedDataParallel,
        DistributedDataParallelConfig as DistributedDataParallelConfig,
        finalize_model_grads as finalize_model_grads,
    )
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear as TEColumnParallelLinear,
        TENorm as TENorm,
        TERowParallelLinear as TERowParallelLinear,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel as GPTModel
    from megatron.core.optimizer import (
        OptimizerConfig as OptimizerConfig,
        get_megatron_optimizer as get_megatron_optimizer,
    )
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32 as clip_grad_by_total_norm_fp32
    from megatron.core.packed_seq_params import PackedSeqParams as PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func as get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator as P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection as ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear as ColumnParallelLinear,
        RowParallelLinear as RowParallelLinear,
        VocabParallelEmbedding as VocabParallelEmbedding,
        set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig as TransformerConfig
    from megatron.core.transformer.attention import (
        SelfAttention as SelfAttention,
        SelfAttentionSubmodules as SelfAttentionSubmodules,
    )
    from megatron.core.transformer.mlp import MLP as MLP, MLPSubmodules as MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP as SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer as MoELayer, MoESubmodules as MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP as SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec as ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer as TransformerLayer,
        TransformerLayerSubmodules as TransformerLayerSubmodules,
    )
    from megatron.core.utils import get_te_version as get_te_version

logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it warns of what its trainer would do in another way
# Use torch's AdamW even with Transformer Engine or Apex: checkpoints know where it counts its steps.
_optimizers.USING_PYTORCH_OPTIMIZER = True
# Dropout is 0 here, so random numbers need no state for each part of the model.
initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
parallel_state._set_global_memory_buffer()  # noqa: SLF001 -- scratch memory for parallel layers


@contextmanager
def fresh_scratch() -> Generator[Mapping[object, torch.Tensor]]:
    """Use separate scratch memory in the block, for tensors without memory, so that they leave nothing behind.

    Yields what was taken of it.
    """
    shared = parallel_state._GLOBAL_MEMORY_BUFFER  # noqa: SLF001
    parallel_state._GLOBAL_MEMORY_BUFFER = None  # noqa: SLF001
    parallel_state._set_global_memory_buffer()  # noqa: SLF001
    try:
        yield parallel_state.get_global_memory_buffer().buffer
    finally:
        parallel_state._GLOBAL_MEMORY_BUFFER = shared  # noqa: SLF001
