"""A lightened job for hundreds of simulations: few prompts, read once, and no evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from meshrl.run import Job, RunConfig
from meshrl.tasks import Task, TaskConfig

_PROMPTS: Final = 64
"""Prompts, which are repeated as needed. The duration of simulated calls does not depend on them."""


class Rehearsal:
    """Jobs of one configuration, with the same few prompts."""

    def __init__(self, job: Job[RunConfig], folder: Path) -> None:
        """`folder`: where the prompts are written."""
        self._changes: dict[str, object] = {}
        task = getattr(job.config, "task", None)
        if isinstance(task, TaskConfig):
            rows = Task.load(task).train.objects("row")[:_PROMPTS]
            file = folder / "prompts.jsonl"
            file.write_bytes(msgspec.json.Encoder(enc_hook=str).encode_lines(list(rows)))
            short: dict[str, object] = {"source": str(file), "options": {}, "max_prompt_tokens": None, "held_out": 0}
            self._changes["task"] = task.model_copy(update=short)
        if "evaluation" in type(job.config).model_fields:
            self._changes["evaluation"] = None

    def light(self, job: Job[RunConfig], steps: int) -> Job[RunConfig]:
        """The configuration's job with these prompts and this number of steps, whatever its schedule says."""
        resolved = {key: value for key, value in job.resolved.items() if key != "evaluation"}
        config = job.config.model_copy(update={**self._changes, "steps": steps})
        return replace(job, config=config, run=job.run.model_copy(update={"log": []}), resolved=resolved)
