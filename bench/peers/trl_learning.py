"""One run of TRL's GRPOTrainer, RLOOTrainer or DPOTrainer for bench/learning.py, by `.peers/trl/bin/python`.

    trl_learning.py MODEL JOB FOLDER

MODEL is a Hugging Face folder to start from, JOB a JSON file (`Job` in bench/learning.py). Writes FOLDER/metrics.jsonl,
one object per step with TRL's log of it, and FOLDER/model in the format of transformers. TRL's own files are in
FOLDER/trl. Everything is float32. Each step is one optimizer step on one batch, so TRL uses the log-probs of that step
as those of the sampler. The learning rate is given for each step, because TRL's own warm-up begins at 0, but meshrl's
at its first fraction.
"""

import json
import os
import sys
from pathlib import Path

import score
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


class Log(TrainerCallback):
    """Keeps the trainer's log of each step."""

    def __init__(self) -> None:
        self.lines = []

    def on_log(self, args, state, control, logs, **kwargs):
        """Keep a step's numbers. The final log of the whole run has no `loss`."""
        if "loss" in logs:
            self.lines.append(json.dumps({"step": state.global_step, **logs}))


def main(folder: str, job_path: str, out: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, log = load(folder), Log()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rates"][0], betas=job["betas"], eps=job["eps"], weight_decay=0.0, fused=True
    )
    # The trainer asks for one more rate after the last step.
    rates = [*job["rates"], 0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step] / rates[0])
    trainer = {"grpo": grpo, "rloo": rloo, "dpo": dpo}[job["algorithm"]](
        out,
        job,
        {
            "model": model,
            "processing_class": AutoTokenizer.from_pretrained(folder, padding_side="left"),
            "callbacks": [log],
            "optimizers": (optimizer, schedule),
        },
    )
    trainer.train()
    (Path(out) / "metrics.jsonl").write_text("\n".join(log.lines) + "\n")
    trainer.save_model(str(Path(out) / "model"))


def load(folder: str):
    """The model to start from, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def grpo(out: str, job, common):
    """GRPO without a KL penalty: the loss is a mean over tokens, and advantages are divided by the deviation."""
    args = GRPOConfig(**on_policy(out, job), loss_type="dapo", scale_rewards="group", epsilon=job["clip"], beta=0.0)
    return GRPOTrainer(args=args, reward_funcs=exact, train_dataset=prompts(job), **common)


def rloo(out: str, job, common):
    """RLOO without a KL penalty, with unscaled advantages."""
    args = RLOOConfig(**on_policy(out, job), normalize_advantages=False, beta=0.0)
    return RLOOTrainer(args=args, reward_funcs=exact, train_dataset=prompts(job), **common)


def dpo(out: str, job, common):
    """DPO on the pairs in order."""
    args = DPOConfig(
        **settings(out, job),
        per_device_train_batch_size=job["prompts_per_step"],
        train_sampling_strategy="sequential",
        loss_type="sigmoid",
        beta=job["beta"],
    )
    pairs = {"prompt": job["prompts"], "chosen": job["answers"], "rejected": job["rejected"]}
    reference = load(common["model"].name_or_path)
    return DPOTrainer(args=args, ref_model=reference, train_dataset=Dataset.from_dict(pairs), **common)


def exact(prompts, completions, answer, **_):
    """The reward of meshrl's quickstart."""
    rows = zip(prompts, completions, answer, strict=True)
    return [score.exact(prompt, text, {"answer": wanted}) for prompt, text, wanted in rows]


def prompts(job) -> Dataset:
    """The prompts of all steps in order."""
    return Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]})


def on_policy(out: str, job) -> dict[str, object]:
    """Settings of GRPO and RLOO: a batch is drawn, trained on once, and dropped."""
    return {
        **settings(out, job),
        "per_device_train_batch_size": job["prompts_per_step"] * job["completions"],
        "num_generations": job["completions"],
        "num_iterations": 1,
        "max_completion_length": job["max_tokens"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "mask_truncated_completions": False,
        "shuffle_dataset": False,
    }


def settings(out: str, job) -> dict[str, object]:
    """Settings of all three."""
    return {
        "output_dir": str(Path(out) / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": job["max_grad_norm"],
        "max_steps": job["steps"],
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": job["seed"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
