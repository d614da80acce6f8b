"""What our code uses of other packages' interfaces that a GPU needs, where its name does not say it already.

A use is named as `scanning.Use.key` names it. `signatures/` has what stands there, release by release;
`python -m tests.gpu_contracts.renew` writes it anew.
"""

from collections.abc import Mapping
from typing import Final

OBJECTS: Final[Mapping[str, str]] = {
    "megatron.core.distributed.finalize_model_grads": (
        "megatron.core.distributed.finalize_model_grads.finalize_model_grads"
    ),
    "torch.distributed.init_process_group": "torch.distributed.distributed_c10d.init_process_group",
    "meshrl_torch/train/fsdp/sharded.py module.reshard": "torch.distributed.fsdp.FSDPModule.reshard",
    "meshrl_torch/train/fsdp/sharded.py root": "torch.distributed.fsdp.FSDPModule",
    "vllm.LLMEngine": "vllm.v1.engine.llm_engine.LLMEngine",
    "vllm.platforms.current_platform": "vllm.platforms.interface.Platform",
    "meshrl_vllm/engine.py collective_rpc": "vllm.v1.worker.gpu_worker.Worker",
    "meshrl_vllm/engine.py each[]": "vllm.logprobs.Logprob",
    "meshrl_vllm/engine.py handle": "vllm.v1.executor.multiproc_executor.WorkerProcHandle",
    "meshrl_vllm/engine.py one": "vllm.outputs.CompletionOutput",
    "meshrl_vllm/engine.py output": "vllm.outputs.RequestOutput",
    "meshrl_vllm/engine.py processor.request_states.values": (
        "vllm.v1.engine.output_processor.OutputProcessor.request_states"
    ),
    "meshrl_vllm/engine.py self._core": "vllm.v1.engine.core.EngineCore",
    "meshrl_vllm/engine.py self._core.model_executor.workers": (
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor.workers"
    ),
    "meshrl_vllm/engine.py self._core.scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "meshrl_vllm/engine.py self._engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "meshrl_vllm/engine.py self._engine.engine_core": "vllm.v1.engine.core_client.InprocClient",
    "meshrl_vllm/engine.py self._engine.model_config": "vllm.config.model.ModelConfig",
    "meshrl_vllm/engine.py self._vllm": "vllm",
    "meshrl_vllm/engine.py span": "vllm.outputs.WeightVersionSpan",
    "meshrl_vllm/engine.py state": "vllm.v1.engine.output_processor.RequestState",
    "meshrl_vllm/engine.py state.detokenizer": "vllm.v1.engine.detokenizer.IncrementalDetokenizer",
    "meshrl_vllm/engine.py state.logprobs_processor": "vllm.v1.engine.logprobs.LogprobsProcessor",
    "meshrl_vllm/engine.py told[]": "vllm.logprobs.Logprob",
    "meshrl_vllm/transfer.py engine.model": "vllm.model_executor.models.llama.LlamaForCausalLM",
    "meshrl_vllm/transfer.py engine.model_config": "vllm.config.model.ModelConfig",
    "meshrl_vllm/quantized.py Loader": "vllm.model_executor.model_loader.default_loader.DefaultModelLoader",
    "meshrl_vllm/quantized.py model_config": "vllm.config.model.ModelConfig",
    "meshrl_vllm/quantized.py super()": "vllm.model_executor.model_loader.default_loader.DefaultModelLoader",
    "meshrl_vllm/transfer.py Transfer": "vllm.distributed.weight_transfer.base.WeightTransferEngine",
    "meshrl_vllm/transfer.py method": "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase",
    "meshrl_vllm/transfer.py model": "vllm.model_executor.models.llama.LlamaForCausalLM",
    "meshrl_vllm/transfer.py self.model": "vllm.model_executor.models.llama.LlamaForCausalLM",
    "meshrl_vllm/transfer.py self.model_config": "vllm.config.model.ModelConfig",
    "meshrl_vllm/transfer.py self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "meshrl_vllm/transfer.py self.vllm_config.load_config": "vllm.config.load.LoadConfig",
    "meshrl_vllm/transfer.py self.weight_transfer_engine.outcome": (
        "vllm.v1.worker.gpu_worker.Worker.weight_transfer_engine"
    ),
    "meshrl_vllm/whole.py restricting": "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
    "meshrl_vllm/whole.py sampler._sample_random": "vllm.v1.worker.gpu.sample.sampler.Sampler._sample_random",
    "meshrl_vllm/whole.py sampler.topk_topp_sampler": "vllm.v1.sample.sampler.Sampler.topk_topp_sampler",
    "meshrl_sglang/engine.py flushed": "sglang.srt.managers.io_struct.FlushCacheReqOutput",
    "meshrl_sglang/engine.py manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "meshrl_sglang/engine.py meshrl_sglang.scheduler.Processes": "sglang.srt.server_args.ServerArgs",
    "meshrl_sglang/engine.py self._engine": "sglang.srt.entrypoints.engine.Engine",
    "meshrl_sglang/engine.py self._manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "meshrl_sglang/engine.py self._manager.model_config": "sglang.srt.configs.model_config.ModelConfig",
    "meshrl_sglang/engine.py state": "sglang.srt.managers.tokenizer_manager.ReqState",
    "meshrl_sglang/transfer.py manager": "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "meshrl_sglang/scheduler.py Processes": "sglang.srt.entrypoints.engine.Engine",
    "meshrl_sglang/scheduler.py batch": "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "meshrl_sglang/scheduler.py info": "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
    "meshrl_sglang/scheduler.py request": "sglang.srt.managers.schedule_batch.Req",
    "meshrl_sglang/scheduler.py request.sampling_params": "sglang.srt.sampling.sampling_params.SamplingParams",
    "meshrl_sglang/scheduler.py scheduler": "sglang.srt.managers.scheduler.Scheduler",
    "meshrl_sglang/scheduler.py scheduler.model_config": "sglang.srt.configs.model_config.ModelConfig",
    "meshrl_sglang/scheduler.py super()": "sglang.srt.entrypoints.engine.Engine",
    "meshrl_sglang/transfer.py model": "sglang.srt.models.llama.LlamaForCausalLM",
}
"""What a name stands for: it, and all that is reached through it, is an attribute of that there."""

_TE = "transformer_engine.pytorch.module"
_LINEAR = """
bias device fuse_wgrad_accumulation get_rng_state_tracker in_features init_method out_features parallel_mode
params_dtype return_bias rng_tracker_name sequence_parallel tp_group tp_size
"""
TRANSFORMER_ENGINE: Final[Mapping[str, tuple[int, str]]] = {
    f"{_TE}.linear.Linear": (0, _LINEAR),
    f"{_TE}.linear.Linear.forward": (1, "is_first_microbatch"),
    f"{_TE}.rmsnorm.RMSNorm": (0, "device eps hidden_size params_dtype sequence_parallel zero_centered_gamma"),
}
"""What our layers ask of Transformer Engine through Megatron-Core's classes: positional arguments, and keywords."""

NOT_THEIRS: Final = {
    "meshrl_sglang/engine.py self._engine.schedulers": "a field that Processes adds",
    "meshrl_sglang/engine.py self._loop": "asyncio's",
    "meshrl_sglang/engine.py states": "a dictionary",
    "meshrl_sglang/scheduler.py self._tokenizer": "transformers'",
    "meshrl_sglang/transfer.py model.parameters": "torch's",
    "meshrl_vllm/engine.py collective_rpc.tell_outcome": "the worker's method that Extension adds",
    "meshrl_vllm/engine.py collective_rpc.tell_whole": "the worker's method that Extension adds",
    "meshrl_vllm/transfer.py engine.begin": "our Transfer's",
    "meshrl_vllm/quantized.py model": "torch's",
    "meshrl_vllm/transfer.py Transfer.begin": "a method that our Transfer adds",
    "meshrl_vllm/transfer.py Transfer._load": "a method that our Transfer adds",
    "meshrl_vllm/transfer.py model.modules": "torch's",
    "meshrl_vllm/transfer.py head.cpu_linear": "set by the function that is called there, and asked for before",
}
"""What begins at something foreign and is not, with why."""
