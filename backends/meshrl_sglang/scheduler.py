"""SGLang's schedulers: a process for each place along tp, where rows are decoded as a sampler promises it."""

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
    """SGLang's engine, which tells its schedulers' processes."""

    schedulers: ClassVar[list[BaseProcess]] = []

    @classmethod
    def _launch_scheduler_processes(cls, *arguments: Any, **keywords: Any) -> Any:
        made = super()._launch_scheduler_processes(*arguments, **keywords)
        cls.schedulers += made[1]
        return made


def run(*arguments: Any, **keywords: Any) -> None:
    """What a scheduler's process does."""
    _give_seeds()
    _give_texts()
    _read_anew_what_waits()
    _restrict_as_other_samplers()
    run_scheduler_process(*arguments, **keywords)


def _give_seeds() -> None:
    """SGLang reads a row's seed in its deterministic mode alone, which is slow: read it always."""
    make = SamplingBatchInfo.from_schedule_batch

    def made(batch: Any, vocabulary: int) -> Any:
        info = make(batch, vocabulary)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(made)


def _give_texts() -> None:
    """SGLang looks for stop texts only where it also makes each row's text, and has ends of its own: it has neither."""
    begin = Scheduler.init_tokenizer

    def begun(scheduler: Any) -> None:
        begin(scheduler)
        folder = scheduler.model_config.model_path
        scheduler.tokenizer = Texts(folder)
        scheduler.model_config.hf_eos_token_id = None
        transfer.naming(folder)  # now, and not while the first new weights are taken

    Scheduler.init_tokenizer = begun


def _read_anew_what_waits() -> None:
    """Rows that wait while others keep what old weights made of their tokens meet nothing of it when they begin."""
    pause, times = Scheduler.pause_generation, count()

    def paused(scheduler: Any, order: Any) -> None:
        pause(scheduler, order)
        salt = f"waited {next(times)}"
        for request in scheduler.waiting_queue:
            request.cache_salt = salt

    Scheduler.pause_generation = paused


def _restrict_as_other_samplers() -> None:
    """`top_p` is of what `top_k` leaves, and not, as SGLang has it, of all tokens.

    What is left is drawn from in the order of the tokens, as where nothing is restricted: SGLang draws in the order of
    their probabilities, and that for all rows of a batch where one of them is restricted, or greedy.
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
    """What is left of a tokenizer: the texts of tokens, and no end."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._folder)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> bytes:
        """As many as the text may have tokens: SGLang looks for it in so many of the last."""
        return text.encode()

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
