"""Rollouts by transformers: two contestants of bench/rollout.py.

    hf_rollout.py generate|batching FOLDER JOB

Like vllm_rollout.py, but without log-probs or seeds, and each line {"rows": true} is one batch.

generate   one padded batch of all rows, which ends with its longest; EOS ends each row at its limit
batching   `generate_batch`'s manager, kept from turn to turn; a limit for each request, and no EOS

Uses float32, sdpa, a growing cache, and blocks for all tokens of all rows.
"""

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from lengths import ForcedLengths
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
)


class Generate:
    """Plain `generate`."""

    def __init__(self, model, tokenizer, job) -> None:
        self.model, self.eos, self.job = model, tokenizer.eos_token_id, job
        self.tokenizer = tokenizer

    def __call__(self) -> int:
        """Generate, and return the number of new tokens."""
        job = self.job
        rows = [job["ids"][prompt] for prompt in job["rows"]]
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        out = self.model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(job["limits"]),
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.eos,
            logits_processor=LogitsProcessorList([ForcedLengths(job["limits"], self.eos)]),
        )
        new = out[:, batch["input_ids"].shape[1] :]
        return int(((new == self.eos).int().argmax(1) + 1).sum())

    def close(self) -> None:
        """Do nothing: no thread is running."""


class Batching:
    """The continuous batching of transformers."""

    def __init__(self, model, tokenizer, job) -> None:
        self.job = job
        generation = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1)
        generation.max_new_tokens = max(job["limits"])
        self.manager = model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16,
                num_blocks=sum(-(-(limit + 16) // 16) for limit in job["limits"]),
                max_batch_tokens=2 * len(job["rows"]),
                use_cuda_graph=False,
            ),
        )
        self.manager.start()

    def __call__(self) -> int:
        """Generate, and return the number of new tokens."""
        for prompt, limit in zip(self.job["rows"], self.job["limits"], strict=True):
            self.manager.add_request(self.job["ids"][prompt], max_new_tokens=limit, eos_token_id=-1)
        tokens, left = 0, len(self.job["rows"])
        while left:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise SystemExit("transformers' continuous batching has ended before its rows did")
                continue
            if result.error:
                raise SystemExit(result.error)
            if result.is_finished():
                tokens += len(result.generated_tokens)
                left -= 1
        return tokens

    def close(self) -> None:
        """End its thread, for which Python would wait."""
        self.manager.stop()


@torch.no_grad()
def main(kind: str, folder: str, job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with closing({"generate": Generate, "batching": Batching}[kind](model, tokenizer, job)) as rollouts:
        print('{"ready": true}', flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            tokens = rollouts()
            wall = time.perf_counter() - began
            print(json.dumps({"wall": wall, "rows": len(job["rows"]), "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
