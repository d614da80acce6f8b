"""Rollouts by vLLM alone: a contestant of bench/rollout.py, run by `.venv-vllm/bin/python`.

    vllm_rollout.py FOLDER JOB

FOLDER is a Hugging Face model, JOB a JSON file with the prompts' token ids, the rows' prompts and limits, and the
engine's numbers. The first line on standard output is {"ready": true}. Then each line {"seeds": [...]} on standard
input, with a seed for each row, is one batch of rollouts, answered by {"wall", "rows", "tokens", "checksum"}.

The engine is called in this process as vLLM's own `LLM` calls it, with the arguments of the backend vllm. Rows are
returned complete when they have ended, without texts. The engine's log-probs are not read.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np

os.environ.update(
    OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1"
)

# Imported after the environment is set, which it reads on import.
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main(folder: str, job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    arguments = EngineArgs(
        model=folder,
        dtype="float32",
        max_model_len=job["max_tokens"],
        max_num_seqs=job["slots"],
        enforce_eager=True,
        enable_chunked_prefill=False,  # required for rows with seeds on a CPU
        kv_cache_memory_bytes=job["kv_cache_mib"] << 20,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    print('{"ready": true}', flush=True)
    for turn, line in enumerate(sys.stdin):
        print(json.dumps(rollouts(engine, job, json.loads(line)["seeds"], turn)), flush=True)


def rollouts(engine: LLMEngine, job, seeds: list[int], turn: int) -> dict[str, float]:
    """Make one batch of rollouts."""
    began = time.perf_counter()
    for row, (prompt, limit, seed) in enumerate(zip(job["rows"], job["limits"], seeds, strict=True)):
        sampling = SamplingParams(
            seed=seed,
            max_tokens=limit,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt prevents prefix-cache hits from earlier turns, as new weights do in training.
        tokens = {"prompt_token_ids": job["ids"][prompt], "cache_salt": str(turn)}
        engine.add_request(f"{turn}-{row}", tokens, sampling)
    drawn = [[]] * len(seeds)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                drawn[int(output.request_id.partition("-")[2])] = output.outputs[0].token_ids
    wall = time.perf_counter() - began
    tokens = np.concatenate([np.array(list(row), np.int32) for row in drawn])
    return {"wall": wall, "rows": len(drawn), "tokens": len(tokens), "checksum": zlib.crc32(tokens.tobytes())}


if __name__ == "__main__":
    main(*sys.argv[1:])
