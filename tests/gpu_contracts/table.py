"""Every use of another package's interface that a GPU needs, and where that package defines it: `FILE NAME`.

A use is named as `scanning.Use.key` names it. `signatures/` has what stands there, release by release;
`python -m tests.gpu_contracts.renew` writes it anew.
"""

from collections.abc import Mapping
from typing import Final

_CUDA: Final = "torch/cuda/__init__.py"
_FSDP: Final = "torch/distributed/fsdp/_fully_shard"
_MODULE: Final = f"{_FSDP}/_fully_shard.py FSDPModule"
_POLICY: Final = f"{_FSDP}/_fsdp_api.py"

TORCH: Final[Mapping[str, str]] = {
    "torch.cuda.current_device": f"{_CUDA} current_device",
    "torch.cuda.current_stream": f"{_CUDA} current_stream",
    "torch.cuda.device_count": f"{_CUDA} device_count",
    "torch.cuda.get_device_capability": f"{_CUDA} get_device_capability",
    "torch.cuda.get_device_properties": f"{_CUDA} get_device_properties",
    "torch.cuda.is_available": f"{_CUDA} is_available",
    "torch.distributed.distributed_c10d._abort_process_group": (
        "torch/distributed/distributed_c10d.py _abort_process_group"
    ),
    "torch.distributed.distributed_c10d.ProcessGroupNCCL": "torch/_C/_distributed_c10d.pyi ProcessGroupNCCL",
    "torch.distributed.distributed_c10d.ProcessGroupNCCL.Options": (
        "torch/_C/_distributed_c10d.pyi ProcessGroupNCCL.Options"
    ),
    "torch.distributed.fsdp.CPUOffloadPolicy": f"{_POLICY} CPUOffloadPolicy",
    "torch.distributed.fsdp.FSDPModule": _MODULE,
    "torch.distributed.fsdp.FSDPModule.reshard": f"{_MODULE}.reshard",
    "torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms": (
        f"{_MODULE}.set_force_sum_reduction_for_comms"
    ),
    "torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor": f"{_MODULE}.set_gradient_divide_factor",
    **{
        f"torch.distributed.fsdp.FSDPModule.{name}": f"{_MODULE}.{name}"
        for name in ("set_is_last_backward", "set_modules_to_forward_prefetch", "set_requires_gradient_sync")
    },
    "torch.distributed.fsdp.MixedPrecisionPolicy": f"{_POLICY} MixedPrecisionPolicy",
    "torch.distributed.fsdp.OffloadPolicy": f"{_POLICY} OffloadPolicy",
    "torch.distributed.fsdp.fully_shard": f"{_FSDP}/_fully_shard.py fully_shard",
    "torch.distributed.init_process_group": "torch/distributed/distributed_c10d.py init_process_group",
    "torch.multiprocessing.reductions.rebuild_cuda_tensor": "torch/multiprocessing/reductions.py rebuild_cuda_tensor",
    "torch.multiprocessing.reductions.reduce_tensor": "torch/multiprocessing/reductions.py reduce_tensor",
    "torch.nn.attention.varlen": "torch/nn/attention/varlen.py",
    "torch.nn.attention.varlen.varlen_attn": "torch/nn/attention/varlen.py varlen_attn",
    "torch.version.cuda": "torch/version.py cuda",
}

FLASH_ATTENTION: Final[Mapping[str, str]] = {
    "flash_attn.cute": "flash_attn/cute/__init__.py",
    "flash_attn.cute.flash_attn_varlen_func": "flash_attn/cute/interface.py flash_attn_varlen_func",
    "flash_attn.flash_attn_varlen_func": "flash_attn/flash_attn_interface.py flash_attn_varlen_func",
}

_CORE: Final = "megatron/core"
_PARALLEL: Final = f"{_CORE}/tensor_parallel"
_BLOCKS: Final = f"{_CORE}/transformer"

MEGATRON: Final[Mapping[str, str]] = {
    "megatron.core.distributed.DistributedDataParallel": (
        f"{_CORE}/distributed/distributed_data_parallel.py DistributedDataParallel"
    ),
    "megatron.core.distributed.DistributedDataParallelConfig": (
        f"{_CORE}/distributed/distributed_data_parallel_config.py DistributedDataParallelConfig"
    ),
    "megatron.core.distributed.finalize_model_grads": (
        f"{_CORE}/distributed/finalize_model_grads.py finalize_model_grads"
    ),
    **{
        f"megatron.core.extensions.transformer_engine.{name}": f"{_CORE}/extensions/transformer_engine.py {name}"
        for name in ("TEColumnParallelLinear", "TENorm", "TERowParallelLinear")
    },
    "megatron.core.fusions.fused_bias_dropout.get_bias_dropout_add": (
        f"{_CORE}/fusions/fused_bias_dropout.py get_bias_dropout_add"
    ),
    "megatron.core.models.gpt.GPTModel": f"{_CORE}/models/gpt/gpt_model.py GPTModel",
    "megatron.core.optimizer": f"{_CORE}/optimizer/__init__.py",
    "megatron.core.optimizer.OptimizerConfig": f"{_CORE}/optimizer/optimizer_config.py OptimizerConfig",
    "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER": f"{_CORE}/optimizer/__init__.py USING_PYTORCH_OPTIMIZER",
    "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32": (
        f"{_CORE}/optimizer/clip_grads.py clip_grad_by_total_norm_fp32"
    ),
    "megatron.core.optimizer.get_megatron_optimizer": f"{_CORE}/optimizer/__init__.py get_megatron_optimizer",
    "megatron.core.packed_seq_params.PackedSeqParams": f"{_CORE}/packed_seq_params.py PackedSeqParams",
    "megatron.core.parallel_state": f"{_CORE}/parallel_state.py",
    **{
        f"megatron.core.parallel_state.{name}": f"{_CORE}/parallel_state.py {name}"
        for name in ("_GLOBAL_MEMORY_BUFFER", "_set_global_memory_buffer", "get_global_memory_buffer")
    },
    "megatron.core.pipeline_parallel.get_forward_backward_func": (
        f"{_CORE}/pipeline_parallel/schedules.py get_forward_backward_func"
    ),
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator": (
        f"{_CORE}/pipeline_parallel/p2p_communication.py P2PCommunicator"
    ),
    "megatron.core.process_groups_config.ProcessGroupCollection": (
        f"{_CORE}/process_groups_config.py ProcessGroupCollection"
    ),
    "megatron.core.tensor_parallel.ColumnParallelLinear": f"{_PARALLEL}/layers.py ColumnParallelLinear",
    "megatron.core.tensor_parallel.RowParallelLinear": f"{_PARALLEL}/layers.py RowParallelLinear",
    "megatron.core.tensor_parallel.VocabParallelEmbedding": f"{_PARALLEL}/layers.py VocabParallelEmbedding",
    "megatron.core.tensor_parallel.mappings.copy_to_tensor_model_parallel_region": (
        f"{_PARALLEL}/mappings.py copy_to_tensor_model_parallel_region"
    ),
    "megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region": (
        f"{_PARALLEL}/mappings.py gather_from_sequence_parallel_region"
    ),
    "megatron.core.tensor_parallel.random.initialize_rng_tracker": f"{_PARALLEL}/random.py initialize_rng_tracker",
    "megatron.core.tensor_parallel.set_tensor_model_parallel_attributes": (
        f"{_PARALLEL}/layers.py set_tensor_model_parallel_attributes"
    ),
    "megatron.core.transformer.TransformerConfig": f"{_BLOCKS}/transformer_config.py TransformerConfig",
    "megatron.core.transformer.attention.SelfAttention": f"{_BLOCKS}/attention.py SelfAttention",
    "megatron.core.transformer.attention.SelfAttentionSubmodules": f"{_BLOCKS}/attention.py SelfAttentionSubmodules",
    "megatron.core.transformer.mlp.MLP": f"{_BLOCKS}/mlp.py MLP",
    "megatron.core.transformer.mlp.MLPSubmodules": f"{_BLOCKS}/mlp.py MLPSubmodules",
    "megatron.core.transformer.moe.experts.SequentialMLP": f"{_BLOCKS}/moe/experts.py SequentialMLP",
    "megatron.core.transformer.moe.moe_layer.MoELayer": f"{_BLOCKS}/moe/moe_layer.py MoELayer",
    "megatron.core.transformer.moe.moe_layer.MoESubmodules": f"{_BLOCKS}/moe/moe_layer.py MoESubmodules",
    "megatron.core.transformer.moe.router.TopKRouter": f"{_BLOCKS}/moe/router.py TopKRouter",
    "megatron.core.transformer.spec_utils.ModuleSpec": f"{_BLOCKS}/spec_utils.py ModuleSpec",
    "megatron.core.transformer.transformer_block.TransformerBlockSubmodules": (
        f"{_BLOCKS}/transformer_block.py TransformerBlockSubmodules"
    ),
    "megatron.core.transformer.transformer_layer.TransformerLayer": (
        f"{_BLOCKS}/transformer_layer.py TransformerLayer"
    ),
    "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules": (
        f"{_BLOCKS}/transformer_layer.py TransformerLayerSubmodules"
    ),
    "megatron.core.utils.get_te_version": f"{_CORE}/utils.py get_te_version",
}

TRANSFORMER_ENGINE: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {
    "transformer_engine/pytorch/module/linear.py Linear": (
        0,
        (
            "bias",
            "device",
            "fuse_wgrad_accumulation",
            "get_rng_state_tracker",
            "in_features",
            "init_method",
            "out_features",
            "parallel_mode",
            "params_dtype",
            "return_bias",
            "rng_tracker_name",
            "sequence_parallel",
            "tp_group",
            "tp_size",
        ),
    ),
    "transformer_engine/pytorch/module/linear.py Linear.forward": (1, ("is_first_microbatch",)),
    "transformer_engine/pytorch/module/rmsnorm.py RMSNorm": (
        0,
        ("device", "eps", "hidden_size", "params_dtype", "sequence_parallel", "zero_centered_gamma"),
    ),
}
"""What our layers ask of Transformer Engine through Megatron-Core's classes: positional arguments, and keywords."""

_ENGINE: Final = "vllm/v1/engine/llm_engine.py LLMEngine"
_ENGINE_CORE: Final = "vllm/v1/engine/core.py EngineCore"
_OUTPUTS: Final = "vllm/outputs.py"
_STATE: Final = "vllm/v1/engine/output_processor.py RequestState"
_TRANSFER: Final = "vllm/distributed/weight_transfer"
_TRANSFER_ENGINE: Final = f"{_TRANSFER}/base.py WeightTransferEngine"
_WORKER: Final = "vllm/v1/worker/gpu_worker.py Worker"
_MODEL: Final = "vllm/model_executor/models/llama.py LlamaForCausalLM"
_LOADER: Final = "vllm/model_executor/model_loader/default_loader.py DefaultModelLoader"
_RELOAD: Final = "vllm/model_executor/model_loader/reload"

VLLM: Final[Mapping[str, str]] = {
    "vllm": "vllm/__init__.py",
    "vllm.EngineArgs": "vllm/engine/arg_utils.py EngineArgs",
    "vllm.LLMEngine.from_engine_args": f"{_ENGINE}.from_engine_args",
    "vllm.__version__": "vllm/version.py __version__",
    "vllm.config.weight_transfer.WeightTransferConfig": "vllm/config/weight_transfer.py WeightTransferConfig",
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": _TRANSFER_ENGINE,
    "vllm.distributed.weight_transfer.base.WeightTransferInitInfo": f"{_TRANSFER}/base.py WeightTransferInitInfo",
    "vllm.distributed.weight_transfer.base.WeightTransferUpdateInfo": f"{_TRANSFER}/base.py WeightTransferUpdateInfo",
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory": (
        f"{_TRANSFER}/factory.py WeightTransferEngineFactory"
    ),
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory.register_engine": (
        f"{_TRANSFER}/factory.py WeightTransferEngineFactory.register_engine"
    ),
    "vllm.entrypoints.openai.api_server": "vllm/entrypoints/openai/api_server.py",
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": (
        "vllm/model_executor/layers/utils.py dispatch_cpu_unquantized_gemm"
    ),
    "vllm.model_executor.model_loader.default_loader.DefaultModelLoader": _LOADER,
    "vllm.model_executor.model_loader.register_model_loader": (
        "vllm/model_executor/model_loader/__init__.py register_model_loader"
    ),
    "vllm.model_executor.model_loader.reload.finalize_layerwise_reload": (
        f"{_RELOAD}/layerwise.py finalize_layerwise_reload"
    ),
    "vllm.model_executor.model_loader.reload.initialize_layerwise_reload": (
        f"{_RELOAD}/layerwise.py initialize_layerwise_reload"
    ),
    "vllm.platforms.current_platform": "vllm/platforms/interface.py Platform",
    "vllm.platforms.current_platform.is_cpu": "vllm/platforms/interface.py Platform.is_cpu",
    "meshrl_vllm/engine.py collective_rpc:finish_weight_update": f"{_WORKER}.finish_weight_update",
    "meshrl_vllm/engine.py collective_rpc:init_weight_transfer_engine": f"{_WORKER}.init_weight_transfer_engine",
    "meshrl_vllm/engine.py collective_rpc:start_weight_update": f"{_WORKER}.start_weight_update",
    "meshrl_vllm/engine.py collective_rpc:update_weights": f"{_WORKER}.update_weights",
    "meshrl_vllm/engine.py each[].logprob": "vllm/logprobs.py Logprob.logprob",
    "meshrl_vllm/engine.py handle.proc": "vllm/v1/executor/multiproc_executor.py WorkerProcHandle.proc",
    "meshrl_vllm/engine.py one.finish_reason": f"{_OUTPUTS} CompletionOutput.finish_reason",
    "meshrl_vllm/engine.py one.logprobs": f"{_OUTPUTS} CompletionOutput.logprobs",
    "meshrl_vllm/engine.py one.token_ids": f"{_OUTPUTS} CompletionOutput.token_ids",
    "meshrl_vllm/engine.py one.weight_versions": f"{_OUTPUTS} CompletionOutput.weight_versions",
    "meshrl_vllm/engine.py output.finished": f"{_OUTPUTS} RequestOutput.finished",
    "meshrl_vllm/engine.py output.outputs": f"{_OUTPUTS} RequestOutput.outputs",
    "meshrl_vllm/engine.py output.prompt_logprobs": f"{_OUTPUTS} RequestOutput.prompt_logprobs",
    "meshrl_vllm/engine.py output.prompt_token_ids": f"{_OUTPUTS} RequestOutput.prompt_token_ids",
    "meshrl_vllm/engine.py output.request_id": f"{_OUTPUTS} RequestOutput.request_id",
    "meshrl_vllm/engine.py processor.request_states.values": (
        "vllm/v1/engine/output_processor.py OutputProcessor.request_states"
    ),
    "meshrl_vllm/engine.py self._core.model_executor": f"{_ENGINE_CORE}.model_executor",
    "meshrl_vllm/engine.py self._core.model_executor.workers": (
        "vllm/v1/executor/multiproc_executor.py MultiprocExecutor.workers"
    ),
    "meshrl_vllm/engine.py self._core.pause_scheduler": f"{_ENGINE_CORE}.pause_scheduler",
    "meshrl_vllm/engine.py self._core.resume_scheduler": f"{_ENGINE_CORE}.resume_scheduler",
    "meshrl_vllm/engine.py self._core.scheduler.max_num_active_reqs": (
        "vllm/v1/core/sched/scheduler.py Scheduler.max_num_active_reqs"
    ),
    "meshrl_vllm/engine.py self._engine.abort_request": f"{_ENGINE}.abort_request",
    "meshrl_vllm/engine.py self._engine.add_request": f"{_ENGINE}.add_request",
    "meshrl_vllm/engine.py self._engine.collective_rpc": f"{_ENGINE}.collective_rpc",
    "meshrl_vllm/engine.py self._engine.engine_core.engine_core": (
        "vllm/v1/engine/core_client.py InprocClient.engine_core"
    ),
    "meshrl_vllm/engine.py self._engine.has_unfinished_requests": f"{_ENGINE}.has_unfinished_requests",
    "meshrl_vllm/engine.py self._engine.model_config.get_vocab_size": "vllm/config/model.py ModelConfig.get_vocab_size",
    "meshrl_vllm/engine.py self._engine.output_processor": f"{_ENGINE}.output_processor",
    "meshrl_vllm/engine.py self._engine.reset_prefix_cache": f"{_ENGINE}.reset_prefix_cache",
    "meshrl_vllm/engine.py self._engine.set_weight_version": f"{_ENGINE}.set_weight_version",
    "meshrl_vllm/engine.py self._engine.sleep": f"{_ENGINE}.sleep",
    "meshrl_vllm/engine.py self._engine.step": f"{_ENGINE}.step",
    "meshrl_vllm/engine.py self._engine.wake_up": f"{_ENGINE}.wake_up",
    "meshrl_vllm/engine.py self._vllm.SamplingParams": "vllm/sampling_params.py SamplingParams",
    "meshrl_vllm/engine.py self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY": (
        "vllm/sampling_params.py RequestOutputKind.FINAL_ONLY"
    ),
    "meshrl_vllm/engine.py span.start": f"{_OUTPUTS} WeightVersionSpan.start",
    "meshrl_vllm/engine.py span.version": f"{_OUTPUTS} WeightVersionSpan.version",
    "meshrl_vllm/engine.py state.detokenizer.output_token_ids": (
        "vllm/v1/engine/detokenizer.py IncrementalDetokenizer.output_token_ids"
    ),
    "meshrl_vllm/engine.py state.external_req_id": f"{_STATE}.external_req_id",
    "meshrl_vllm/engine.py state.logprobs_processor.logprobs": "vllm/v1/engine/logprobs.py LogprobsProcessor.logprobs",
    "meshrl_vllm/engine.py state.weight_version_starts": f"{_STATE}.weight_version_starts",
    "meshrl_vllm/engine.py told[].logprob": "vllm/logprobs.py Logprob.logprob",
    "meshrl_vllm/following.py engine.model.load_weights": f"{_MODEL}.load_weights",
    "meshrl_vllm/following.py engine.model_config.model": "vllm/config/model.py ModelConfig.model",
    "meshrl_vllm/quantized.py Loader.get_all_weights": f"{_LOADER}.get_all_weights",
    "meshrl_vllm/quantized.py model_config.model": "vllm/config/model.py ModelConfig.model",
    "meshrl_vllm/quantized.py super().__init__": _LOADER,
    "meshrl_vllm/quantized.py super().get_all_weights": f"{_LOADER}.get_all_weights",
    "meshrl_vllm/transfer.py Transfer.finish_weight_update": f"{_TRANSFER_ENGINE}.finish_weight_update",
    "meshrl_vllm/transfer.py Transfer.init_transfer_engine": f"{_TRANSFER_ENGINE}.init_transfer_engine",
    "meshrl_vllm/transfer.py Transfer.receive_weights": f"{_TRANSFER_ENGINE}.receive_weights",
    "meshrl_vllm/transfer.py Transfer.shutdown": f"{_TRANSFER_ENGINE}.shutdown",
    "meshrl_vllm/transfer.py Transfer.start_weight_update": f"{_TRANSFER_ENGINE}.start_weight_update",
    "meshrl_vllm/transfer.py method.moe_kernel": (
        "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py FusedMoEMethodBase.moe_kernel"
    ),
    "meshrl_vllm/transfer.py model.lm_head": f"{_MODEL}.lm_head",
    "meshrl_vllm/transfer.py self.model.load_weights": f"{_MODEL}.load_weights",
    "meshrl_vllm/transfer.py self.model_config.model": "vllm/config/model.py ModelConfig.model",
    "meshrl_vllm/transfer.py self.model_runner.sampler": "vllm/v1/worker/gpu_model_runner.py GPUModelRunner.sampler",
    "meshrl_vllm/transfer.py self.vllm_config.load_config.load_format": "vllm/config/load.py LoadConfig.load_format",
    "meshrl_vllm/transfer.py self.weight_transfer_engine.outcome": f"{_WORKER}.weight_transfer_engine",
    "meshrl_vllm/whole.py restricting.forward": "vllm/v1/sample/ops/topk_topp_sampler.py TopKTopPSampler.forward",
    "meshrl_vllm/whole.py sampler._sample_random": "vllm/v1/worker/gpu/sample/sampler.py Sampler._sample_random",
    "meshrl_vllm/whole.py sampler.topk_topp_sampler": "vllm/v1/sample/sampler.py Sampler.topk_topp_sampler",
}
