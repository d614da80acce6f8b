"""GRPO steps by TRL's GRPOTrainer: a contestant of bench/grpo.py, run by `.peers/trl/bin/python`.

    trl_grpo.py FOLDER JOB

FOLDER is a Hugging Face model, JOB a JSON file with prompts, shapes and hyperparameters. The first line on standard
output is {"ready": true}. Then each line {"steps": k} on standard input makes k whole GRPO steps, answered by one line
{"wall", "cpu", "rows", "tokens", "reward"}: wall-clock seconds, CPU seconds of all threads of this process, rows,
completion tokens, and mean reward. Between an answer and the next question the trainer is idle.

The settings are TRL's fastest on a CPU, among those tried: float32, no gradient checkpointing, fused AdamW, sdpa, plain
`generate` (the continuous batching of transformers made 3,400 tokens a second where that made 4,500), a growing
key-value cache for short completions and a static one for long, no logging, saving or progress bar. One `generate` per
step. The sampler's log-probs are not computed again, because one update follows each generation.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import score
import torch
from datasets import Dataset
from lengths import ForcedLengths
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# The fastest of 32, 64, 128 and 512 for completions of up to 256 tokens. Short ones are fastest in one batch.
LONG_MICRO_ROWS = 64


class Turns(TrainerCallback):
    """Stops the trainer after each turn until the next question."""

    def __init__(self) -> None:
        self.rows = 0
        self.tokens = 0
        self.reward = 0.0
        self.left = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Wait for the first turn."""
        print(json.dumps({"ready": True}), flush=True)
        self._wait(control)

    def on_step_end(self, args, state, control, **kwargs):
        """Answer when the turn is over, and wait for the next."""
        self.left -= 1
        if self.left == 0:
            answer = {
                "wall": time.perf_counter() - self.wall,
                "cpu": time.process_time() - self.cpu,
                "rows": self.rows,
                "tokens": self.tokens,
                "reward": self.reward / max(self.rows, 1),
            }
            print(json.dumps(answer), flush=True)
            self._wait(control)

    def count(self, completion_ids, rewards) -> None:
        """Add one step's rows."""
        self.rows += len(completion_ids)
        self.tokens += sum(map(len, completion_ids))
        self.reward += sum(rewards)

    def _wait(self, control) -> None:
        question = sys.stdin.readline()
        if not question.strip():
            control.should_training_stop = True
            return
        self.left = json.loads(question)["steps"]
        self.rows = self.tokens = 0
        self.reward = 0.0
        self.wall, self.cpu = time.perf_counter(), time.process_time()


def main(folder: str, job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    turns, judge = Turns(), getattr(score, job["reward"])

    def reward(prompts, completions, completion_ids, answer, **_):
        rows = zip(prompts, completions, answer, strict=True)
        rewards = [judge(prompt, text, {"answer": wanted}) for prompt, text, wanted in rows]
        turns.count(completion_ids, rewards)
        return rewards

    if job["lengths"]:
        generate, step = model.generate, iter(range(10**9))

        @functools.wraps(generate)
        def forced(*args, **kwargs):
            lengths = job["lengths"][next(step) % len(job["lengths"])]
            processor = ForcedLengths(lengths, tokenizer.eos_token_id)
            return generate(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)

        model.generate = forced

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(job, folder),
        train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
        processing_class=tokenizer,
        callbacks=[turns],
    )
    trainer.train()


def settings(job, folder: str) -> GRPOConfig:
    """The job's numbers as TRL's settings."""
    rows = job["prompts_per_step"] * job["completions"]
    micro_rows = LONG_MICRO_ROWS if job["lengths"] else rows
    return GRPOConfig(
        output_dir=str(Path(folder) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=rows // micro_rows,
        num_generations=job["completions"],
        max_completion_length=job["max_tokens"],
        cache_implementation="static" if job["lengths"] else None,
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=job["clip"],
        learning_rate=job["lr"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        warmup_steps=job["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=job["max_grad_norm"],
        max_steps=10**6,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
