"""SGLang's schedulers: a process for each place along tp, which decodes rows as samplers have to."""

# SGLang may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from functools import cached_property
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers import sampler
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor
from transformers import AutoTokenizer

from meshrl_sglang import transfer


class Processes(Engine):
    """SGLang's engine with access to its schedulers' processes."""

    schedulers: ClassVar[list[BaseProcess]] = []

    @classmethod
    def _launch_scheduler_processes(cls, *arguments: Any, **keywords: Any) -> Any:
        made = super()._launch_scheduler_processes(*arguments, **keywords)
        cls.schedulers += made[1]
        return made


def run(*arguments: Any, **keywords: Any) -> None:
    """Run a scheduler's process."""
    _give_seeds()
    _give_texts()
    _read_anew_what_waits()
    _restrict_as_other_samplers()
    run_scheduler_process(*arguments, **keywords)


def _give_seeds() -> None:
    """Read the seed of each row always. SGLang reads it only in its slow deterministic mode."""
    make = SamplingBatchInfo.from_schedule_batch

    def made(batch: Any, vocabulary: int) -> Any:
        info = make(batch, vocabulary)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(made)


def _give_texts() -> None:
    """Give SGLang a tokenizer without end tokens. It only serves to find stop texts."""
    begin = Scheduler.init_tokenizer

    def begun(scheduler: Any) -> None:
        begin(scheduler)
        folder = scheduler.model_config.model_path
        scheduler.tokenizer = Texts(folder)
        scheduler.model_config.hf_eos_token_id = None
        transfer.naming(folder)  # now, and not when the first new weights are loaded

    Scheduler.init_tokenizer = begun


def _read_anew_what_waits() -> None:
    """Give waiting rows no prefixes cached with old weights, while running rows keep theirs."""
    pause, times = Scheduler.pause_generation, count()

    def paused(scheduler: Any, order: Any) -> None:
        pause(scheduler, order)
        salt = f"waited {next(times)}"
        for request in scheduler.waiting_queue:
            request.cache_salt = salt

    Scheduler.pause_generation = paused


def _restrict_as_other_samplers() -> None:
    """Apply `top_p` to what `top_k` leaves, instead of all tokens as SGLang does.

    Sample the rest in the order of the tokens, as without restrictions. SGLang samples in the order of probabilities,
    for all rows of a batch if one of them is restricted, or greedy.
    """

    def drawn(
        probabilities: Tensor, top_ks: Tensor, top_ps: Tensor, _min_ps: Tensor, _min_p: bool, seeds: Tensor,
        places: Tensor, **_keys: Any,
    ) -> Tensor:  # fmt: skip
        values, order = probabilities.sort(dim=-1, descending=True, stable=True)
        behind = torch.arange(values.shape[-1], device=values.device)[None] >= top_ks[:, None]
        values = values.masked_fill(behind, 0)
        values = values / values.sum(-1, keepdim=True)
        beyond = (values.cumsum(-1) - values > top_ps[:, None]) & (top_ps[:, None] < 1)
        left = torch.zeros_like(values).scatter(-1, order, values.masked_fill(beyond, 0))
        found: Tensor = sampler.sampling_from_probs_torch(left, seeds, places)
        return found

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = drawn


Processes.run_scheduler_process_func = staticmethod(run)


class Texts:
    """The rest of a tokenizer: the texts of tokens, and no end."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._folder)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> bytes:
        """Return as many values as the text may have tokens: SGLang looks for it in that many of the last."""
        return text.encode()

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
