"""The part of the table that is SGLang's, and what the scan finds that is no other package's."""

from collections.abc import Mapping
from typing import Final

_SRT: Final = "sglang/srt"
_ORDERS: Final = f"{_SRT}/managers/io_struct.py"
_MANAGER: Final = f"{_SRT}/managers/tokenizer_manager.py TokenizerManager"
_SCHEDULER: Final = f"{_SRT}/managers/scheduler.py"
_BATCH: Final = f"{_SRT}/sampling/sampling_batch_info.py SamplingBatchInfo"
_DRAWING: Final = f"{_SRT}/layers/sampler.py"
_ENGINE: Final = f"{_SRT}/entrypoints/engine.py Engine"
_CONFIG: Final = f"{_SRT}/configs/model_config.py ModelConfig"
_ROW: Final = f"{_SRT}/managers/schedule_batch.py Req"

SGLANG: Final[Mapping[str, str]] = {
    "sglang": "sglang/__init__.py",
    "sglang.__version__": "sglang/version.py __version__",
    "sglang.srt.entrypoints.engine.Engine": _ENGINE,
    "sglang.srt.layers.sampler": _DRAWING,
    "sglang.srt.layers.sampler.sampling_from_probs_torch": f"{_DRAWING} sampling_from_probs_torch",
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": (
        f"{_DRAWING} top_k_top_p_min_p_sampling_from_probs_torch"
    ),
    "sglang.srt.managers.io_struct": _ORDERS,
    **{
        f"sglang.srt.managers.io_struct.{name}": f"{_ORDERS} {name}"
        for name in (
            "BeginWeightUpdateReqInput",
            "ContinueGenerationReqInput",
            "EndWeightUpdateReqInput",
            "GenerateReqInput",
            "GetWeightsByNameReqInput",
            "PauseGenerationReqInput",
            "ReleaseMemoryOccupationReqInput",
            "ResumeMemoryOccupationReqInput",
            "UpdateWeightVersionReqInput",
            "UpdateWeightsFromTensorReqInput",
        )
    },
    "sglang.srt.managers.scheduler.Scheduler": f"{_SCHEDULER} Scheduler",
    "sglang.srt.managers.scheduler.Scheduler.init_tokenizer": f"{_SCHEDULER} Scheduler.init_tokenizer",
    "sglang.srt.managers.scheduler.Scheduler.pause_generation": f"{_SCHEDULER} Scheduler.pause_generation",
    "sglang.srt.managers.scheduler.run_scheduler_process": f"{_SCHEDULER} run_scheduler_process",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": _BATCH,
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": f"{_BATCH}.from_schedule_batch",
    "sglang.srt.utils.MultiprocessingSerializer": f"{_SRT}/utils/common.py MultiprocessingSerializer",
    "sglang.srt.utils.MultiprocessingSerializer.serialize": (
        f"{_SRT}/utils/common.py MultiprocessingSerializer.serialize"
    ),
    **{
        f"meshrl_sglang/engine.py {receiver}.{name}": f"{_MANAGER}.{name}"
        for receiver, names in {
            "self._manager": (
                "abort_request",
                "auto_create_handle_loop",
                "flush_cache",
                "generate_request",
                "release_memory_occupation",
                "resume_memory_occupation",
                "rid_to_state",
                "tokenizer",
            ),
            "manager": (
                "begin_weight_update",
                "continue_generation",
                "end_weight_update",
                "pause_generation",
                "update_weight_version",
                "update_weights_from_tensor",
            ),
        }.items()
        for name in names
    },
    "meshrl_sglang/engine.py flushed.success": f"{_ORDERS} FlushCacheReqOutput.success",
    "meshrl_sglang/engine.py self._engine.loop": f"{_ENGINE}.loop",
    "meshrl_sglang/engine.py self._engine.tokenizer_manager": f"{_ENGINE}.tokenizer_manager",
    "meshrl_sglang/engine.py self._manager.model_config.vocab_size": f"{_CONFIG}.vocab_size",
    "meshrl_sglang/engine.py state.dispatched": f"{_SRT}/managers/tokenizer_manager.py ReqState.dispatched",
    "meshrl_sglang/engine.py meshrl_sglang.scheduler.Processes": f"{_SRT}/server_args.py ServerArgs",
    "meshrl_sglang/proof.py manager.get_weights_by_name": f"{_MANAGER}.get_weights_by_name",
    "meshrl_sglang/scheduler.py Processes._launch_scheduler_processes": f"{_ENGINE}._launch_scheduler_processes",
    "meshrl_sglang/scheduler.py super()._launch_scheduler_processes": f"{_ENGINE}._launch_scheduler_processes",
    "meshrl_sglang/scheduler.py batch.reqs": f"{_SRT}/managers/schedule_batch.py ScheduleBatch.reqs",
    "meshrl_sglang/scheduler.py info.device": f"{_BATCH}.device",
    "meshrl_sglang/scheduler.py info.sampling_seed": f"{_BATCH}.sampling_seed",
    "meshrl_sglang/scheduler.py request.cache_salt": f"{_ROW}.cache_salt",
    "meshrl_sglang/scheduler.py request.sampling_params.sampling_seed": (
        f"{_SRT}/sampling/sampling_params.py SamplingParams.sampling_seed"
    ),
    "meshrl_sglang/scheduler.py scheduler.model_config.hf_eos_token_id": f"{_CONFIG}.hf_eos_token_id",
    "meshrl_sglang/scheduler.py scheduler.model_config.model_path": f"{_CONFIG}.model_path",
    "meshrl_sglang/scheduler.py scheduler.tokenizer": f"{_SCHEDULER} Scheduler.tokenizer",
    "meshrl_sglang/scheduler.py scheduler.waiting_queue": f"{_SCHEDULER} Scheduler.waiting_queue",
    "meshrl_sglang/transfer.py model.load_weights": f"{_SRT}/models/llama.py LlamaForCausalLM.load_weights",
}

NOT_THEIRS: Final = {
    "meshrl_sglang/engine.py self._engine.schedulers": "a field that Processes adds",
    "meshrl_sglang/engine.py self._loop.add_reader": "asyncio's",
    "meshrl_sglang/engine.py self._loop.create_task": "asyncio's",
    "meshrl_sglang/engine.py self._loop.remove_reader": "asyncio's",
    "meshrl_sglang/engine.py self._loop.remove_signal_handler": "asyncio's",
    "meshrl_sglang/engine.py self._loop.run_until_complete": "asyncio's",
    "meshrl_sglang/engine.py states.get": "of a dictionary",
    "meshrl_sglang/scheduler.py self._tokenizer.decode": "transformers'",
    "meshrl_sglang/transfer.py model.parameters": "torch's",
    "meshrl_vllm/engine.py collective_rpc:tell_outcome": "the worker's method that Extension adds",
    "meshrl_vllm/engine.py collective_rpc:tell_whole": "the worker's method that Extension adds",
    "meshrl_vllm/following.py engine.begin": "our Transfer's",
    "meshrl_vllm/quantized.py model.parameters": "torch's",
    "meshrl_vllm/transfer.py Transfer.begin": "a method that our Transfer adds",
    "meshrl_vllm/transfer.py Transfer._load": "a method that our Transfer adds",
    "meshrl_vllm/transfer.py head.cpu_linear": "set by the function that is called there, and asked for before",
}
"""What begins at something foreign and is not, with why."""
