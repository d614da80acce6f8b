"""What the megatron backend tells of memory before a run, against what torch's profiler counts over gloo."""

import asyncio
import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3MoeConfig

from meshrl import ClippedLoss, PolicyConfig
from meshrl.engines.hosting.messages import reserved_port
from meshrl.mesh import Rank, rank_context
from meshrl.roles import Work, memory_of
from tests.backends.test_memory import COMPLETION, PROMPT, ROWS, N, rollouts, told

pytestmark = [pytest.mark.megatron, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 4
SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": Qwen3Config(**SIZES, intermediate_size=320),
    "experts": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=4, norm_topk_prob=True
    ),
}
CASES: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "dp": ("dense", {"dp": 4}, {}),
    "cp": ("dense", {"dp": 2, "cp": 2}, {}),
    "pp and tp": ("dense", {"dp": 1, "pp": 2, "tp": 2}, {"dtype": "bfloat16"}),
    "virtual stages": ("dense", {"dp": 2, "pp": 2}, {"megatron": {"virtual_stages": 2}}),
    "tp, recomputed": ("dense", {"dp": 2, "tp": 2}, {"activation_checkpointing": True, "dtype": "bfloat16"}),
    "experts": ("experts", {"dp": 2, "tp": 2}, {"megatron": {"experts": 2}}),
}


def config_of(case: str, folder: str) -> PolicyConfig:
    model, _, changes = CASES[case]
    table = {"model": f"{folder}/{model}", "backend": "megatron", "micro_batch_tokens": 500, **changes}
    return PolicyConfig.model_validate(table)


def most(profiled: Any) -> int:
    """The most bytes of tensors that were alive at once, but for the copies that gloo makes, and NCCL does not."""
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    events = list[tuple[int, int, int, bool]]()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            told, above = event.extra_fields, event.parent
            own = above is not None
            while above is not None:
                own, above = own and not above.name.startswith("c10d::"), above.parent
            events.append((event.start_time_ns, told.alloc_size, told.ptr, own))
    alive, now, peak = dict[int, int](), 0, 0
    for _, size, pointer, own in sorted(events):
        if size > 0 and own:
            alive[pointer] = size
            now += size
            peak = max(peak, now)
        elif size < 0:
            now -= alive.pop(pointer, 0)
    return peak


def tell(_: int, folder: str) -> None:
    """In a process of its own, that is in no group: what is told of each policy."""
    works = {case: Work(axes, PROMPT, COMPLETION, ROWS, N, gpu=0) for case, (_, axes, _) in CASES.items()}
    found = {case: told(memory_of(config_of(case, folder), work)) for case, work in works.items()}
    Path(folder, "told.json").write_text(json.dumps(found))


def measure(number: int, folder: str, port: int) -> None:
    """In each of 4 processes: two updates of each policy, one after the other."""
    from meshrl_megatron.policy import MegatronPolicy  # noqa: PLC0415 -- of the other processes alone

    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    found: dict[str, int] = {}
    for case, (_, axes, _) in CASES.items():
        place = dict(zip(axes, map(int, np.unravel_index(number, tuple(axes.values()))), strict=True))
        rank_context.set(Rank(number, RANKS, place, axes, threads=1))
        batch = rollouts(ROWS // axes["dp"])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            policy = MegatronPolicy(config_of(case, folder))
            for _ in range(2):
                asyncio.run(policy.update(batch, ClippedLoss()))
        found[case] = most(profiled)
        del policy
        gc.collect()
    Path(folder, f"{number}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models")
    for name, shape in MODELS.items():
        random_model(shape, made / name, noise=0)
    return str(made)


@pytest.fixture(scope="module")
def found(folder: str) -> Mapping[str, tuple[int, int]]:
    """By case, what is told, and what the rank took that took most; with experts the mean, as their load is uneven."""
    multiprocessing.set_forkserver_preload([__name__, "meshrl_megatron.policy"])  # imported once, for all of them
    with reserved_port() as store:
        port = store.getsockname()[1]
        start_processes(measure, (folder, port), nprocs=RANKS, start_method="forkserver")
    start_processes(tell, (folder,), nprocs=1, start_method="forkserver")
    ranks = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(RANKS)]
    before = json.loads(Path(folder, "told.json").read_text())
    taken = {case: [rank[case] for rank in ranks] for case in CASES}
    return {
        case: (before[case], sum(each) // RANKS if model == "experts" else max(each))
        for (case, (model, *_)), each in zip(CASES.items(), taken.values(), strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_a_split_policys_memory_is_told_within_a_tenth(case: str, found: Mapping[str, tuple[int, int]]) -> None:
    before, measured = found[case]
    assert before == pytest.approx(measured, rel=0.1)
