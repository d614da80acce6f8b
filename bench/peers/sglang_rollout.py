"""Rollouts by SGLang alone: a contestant of bench/rollout.py, run by `.venv-sglang/bin/python`.

    sglang_rollout.py FOLDER JOB

FOLDER is a Hugging Face model, JOB a JSON file with the prompts' token ids, the rows' prompts and limits, and the
engine's numbers. The first line on standard output is {"ready": true}; then each line on standard input is one batch of
rollouts, answered by {"wall", "rows", "tokens", "checksum"}.

SGLang's own `Engine` gets all rows in one call, with the arguments of the backend sglang. On a CPU, the module path
includes that backend's replacement for SGLang's kernels. It reads no seeds, so its draws differ.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np

os.environ.update(OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1", TORCH_COMPILE_DISABLE="1")

# Imported after the environment is set, which it reads on import.
from sglang import Engine


def main(folder: str, job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    engine = Engine(
        model_path=folder,
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        context_length=job["max_tokens"],
        max_running_requests=job["slots"],
        max_total_tokens=job["slots"] * job["max_tokens"],
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        grammar_backend="none",
        sleep_on_idle=True,  # other contestants take turns
        log_level="error",
    )
    print('{"ready": true}', flush=True)
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(rollouts(engine, job, turn)), flush=True)


def rollouts(engine: Engine, job, turn: int) -> dict[str, float]:
    """Make one batch of rollouts."""
    began = time.perf_counter()
    told = engine.generate(
        input_ids=[job["ids"][prompt] for prompt in job["rows"]],
        sampling_params=[{"temperature": 1.0, "max_new_tokens": limit, "ignore_eos": True} for limit in job["limits"]],
        return_logprob=True,
        cache_salt=str(turn),  # prevents prefix-cache hits from earlier turns, as new weights do in training
    )
    wall = time.perf_counter() - began
    tokens = np.concatenate([np.array(row["output_ids"], np.int32) for row in told])
    return {"wall": wall, "rows": len(told), "tokens": len(tokens), "checksum": zlib.crc32(tokens.tobytes())}


if __name__ == "__main__":
    main(*sys.argv[1:])
