"""The cost of a weight sync to a sampler: 0.5 GiB of bfloat16, against one copy of the bytes.

    python bench/weights.py --json F [--mib 512] [--rounds N] [--parts sync,delta,adapters,collective]
        [--engine processes|ray]

sync    A model of 512 MiB goes from a rank to a vLLM sampler on another, as `publish` sends it. The tensors are copied
        into shared memory and fingerprinted. The engine's process finds them there, and verifies every fingerprint.
        Then vLLM loads them between two steps. This exposed pause is measured separately, because vLLM decodes during
        all the rest. The same through Ray's object store, as between machines, whatever the engine. The reference copy
        is made by one thread into warm memory. vLLM is that of `make test-vllm`, and its kernels choose float types.
delta   What `weight_sync = "delta"` sends for steps of grpo/quickstart, from the model of sft/quickstart, at the
        quickstart's learning rate and at one for large models, in float32 and in bfloat16.

adapters  What `publish` sends of the model of 512 MiB: whole, and its adapter of rank 8 on all linear layers alone.

collective  As many bytes from two ranks of FSDP to two samplers of torch (`weight_sync = "broadcast"`), against gloo's
        own broadcast of the bytes from one process to two, and the memory that a rank needs: over gloo, each rank
        broadcasting its own shards, and handed over in shared memory. Fingerprints are made and compared. A limit is
        gloo with the same casts and fingerprints alone, or with the casts alone. The check of equal log-probs is
        measured separately.

About five minutes.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.collective import collective
from bench.grpo import quickstart, warmed_up_model
from bench.harness import (
    ROOT,
    Figure,
    add_engine,
    arguments,
    copier,
    figure,
    median,
    report,
    start_ray,
    with_allocator,
    within,
)
from meshrl import (
    Actor,
    Gather,
    Mesh,
    PolicyConfig,
    Resources,
    Sampler,
    SamplerConfig,
    Task,
    Weights,
    endpoint,
    group_advantages,
    publish,
    rollout,
)
from meshrl.data import WeightSource
from meshrl.data.delta import DeltaVersion
from meshrl.engines import make_engine
from meshrl.engines.local import RankLoop
from meshrl.engines.ray import RayEngine
from meshrl.mesh import EVERY
from meshrl.roles import with_options
from meshrl.tasks import exact_match
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.options import VllmConfig
from meshrl_vllm.sampler import VllmSampler

PYTHON: Final = ROOT / ".venv-vllm/bin/python"
LAYER_MIB: Final = 32
"""MiB of bfloat16 per layer of the model."""
WARM: Final = 4
"""Syncs before those that count, until memory has room for three versions."""
STEPS: Final = 5
"""Steps whose saving counts, after as many that do not count."""


class Trainer(Actor):
    """Holds a model and sends it as a policy does, without computing anything."""

    def __init__(self, folder: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        own = dict(model.named_parameters())
        self._tensors = {
            name: each.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for name, each in own.items()
        }
        self._sender = WeightSource(changes=False)
        self._version = 0

    @endpoint
    async def weights(self) -> Gather[Weights, EVERY]:
        """Return all weights as a new version."""
        self._version += 1
        return self._sender.weights(self._version, self._tensors.items(), None)


class Here(RayEngine):
    """As on a cluster that meshrl starts itself on this machine alone."""

    @property
    def shares_memory(self) -> bool:
        """True, though this bench started the cluster."""
        return True


class Elsewhere(RayEngine):
    """As on a cluster of several machines, whose memory is not shared."""

    @property
    def shares_memory(self) -> bool:
        """False."""
        return False


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--mib", type=int, default=512, help="how much (default: 512)")
    parser.add_argument("--parts", default="sync,delta,adapters,collective", help="which parts (default: all)")
    add_engine(parser)
    options = parser.parse_args()
    if "sync" in options.parts and not PYTHON.exists():
        raise SystemExit(f"{PYTHON.relative_to(ROOT)} is not there: run `make test-vllm` first")
    with_allocator()
    os.chdir(ROOT)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=RankLoop) as runner:
        if "sync" in options.parts:
            model, nbytes = large_model(Path(folder, "large"), options.mib)
            start_ray()
            try:
                figures += runner.run(sync(model, nbytes, options.engine, options.rounds))
            finally:
                ray.shutdown()
        if "collective" in options.parts:
            model, nbytes = large_model(Path(folder, "spread"), options.mib)
            figures += runner.run(collective(model, nbytes, options.engine, options.rounds))
        if "adapters" in options.parts:
            figures += runner.run(adapters(large_model(Path(folder, "adapted"), options.mib)[0]))
        if "delta" in options.parts:
            figures += runner.run(delta(warmed_up_model(Path(folder))))
    report("weights", figures, options.json)


def large_model(folder: Path, mib: int) -> tuple[str, int]:
    """A Llama of about `mib` MiB in bfloat16, and its size in bytes."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=max(1, mib // LAYER_MIB),
        num_attention_heads=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    character_tokenizer("abcdefgh>", 128).save_pretrained(folder)
    return str(folder), sum(each.numel() * each.element_size() for each in model.parameters())


async def sync(model: str, nbytes: int, engine: str, rounds: int) -> list[Figure]:
    """Syncs of a whole model: without the pause, and the pause. `engine`: the one whose ranks share memory."""
    copy, copies = copier(nbytes), list[float]()
    times: dict[str, list[tuple[float, float]]] = {"shared memory": [], "the object store": []}
    here = Here() if engine == "ray" else make_engine(engine)
    for run, values in zip((here, Elsewhere()), times.values(), strict=True):
        trainer = await (await Mesh.reserve(run, 1, Resources(cpus=0))).spawn(Trainer, model)
        vllm = VllmConfig(python=str(PYTHON), kv_cache_mib=64)
        config = with_options(SamplerConfig(backend="vllm", model=model, dtype="bfloat16", slots=8), vllm)
        sampler = await (await Mesh.reserve(run, 1, Resources(cpus=0))).spawn(VllmSampler, config)
        for _ in range(WARM):
            await timed(trainer, sampler)
        for _ in range(rounds):
            values.append(await timed(trainer, sampler))
            copies.append(copy())
        await run.close()
    copied = median(copies)
    figures: list[Figure] = []
    for name, values in times.items():
        whole, pause = (median([value[index] for value in values]) for index in (0, 1))
        numbers = (f"{nbytes >> 20} MiB through {name}, against one copy", whole * 1e3, "ms", copied * 1e3)
        figures.append(within(*numbers, target=3.0) if name == "shared memory" else figure(*numbers))
        figures.append(figure("  the same as bandwidth", nbytes / whole / 1e9, "GB/s", nbytes / copied / 1e9))
        figures.append(figure("  exposed pause: vLLM takes them in", pause * 1e3, "ms", copied * 1e3))
    return figures


async def timed(trainer: Trainer, sampler: Sampler) -> tuple[float, float]:
    """Seconds of a sync without the pause, and of the pause."""
    began = time.perf_counter()
    places = await sampler.load(await trainer.weights())
    whole, pause = time.perf_counter() - began, float(places.row("pause").max())
    return whole - pause, pause


async def adapters(model: str) -> list[Figure]:
    """The bytes of a whole model and of an adapter, each as a sampler gets them."""
    table = {"model": model, "dtype": "bfloat16", "adapters": {"one": {"rank": 8, "sync": "adapters"}}}
    policy = TorchPolicy(PolicyConfig.model_validate(table))
    sampler = TorchSampler(SamplerConfig(model=model, dtype="bfloat16"))
    whole, alone = await publish(policy, sampler), await publish(policy, sampler, adapter="one")
    name = "bytes of an adapter of rank 8, against those of the model"
    return [within(name, alone.nbytes, "B", whole.nbytes, target=1 / 50)]


async def delta(model: Path) -> list[Figure]:
    """The share of bytes that steps of GRPO change."""
    figures: list[Figure] = []
    for lr, dtype in (("1e-3", "float32"), ("1e-3", "bfloat16"), ("1e-5", "bfloat16"), ("1e-6", "bfloat16")):
        sent = await changed(model, lr, dtype)
        figures.append(figure(f"delta: sent of a step at lr {lr} in {dtype}", 100 * median(sent), "% of the bytes"))
    return figures


async def changed(model: Path, lr: str, dtype: str) -> list[float]:
    """The share of bytes that is sent for each step."""
    config = quickstart(str(model), f"policy.optimizer.lr={lr}")
    table = {**config.policy.model_dump(), "dtype": dtype, "weight_sync": "delta"}
    policy = FsdpPolicy(PolicyConfig.model_validate(table))
    sampler = TorchSampler(SamplerConfig(model=str(model), dtype=config.policy.dtype))
    task, shares = Task.load(config.task), list[float]()
    prompts = task.batches(config.prompts, 0)
    for _ in range(2 * STEPS):
        batch = await rollout(sampler, next(prompts), config.sampling)
        batch = await batch.load("completion", "answer", "groups")
        pairs = zip(batch.objects("completion"), batch.objects("answer"), strict=True)
        rewards = np.array([exact_match("", str(one), {"answer": other}) for one, other in pairs], np.float32)
        advantages = group_advantages(rewards, batch.groups)
        await policy.update(batch.assign(rewards=rewards, advantages=advantages), config.loss)
        weights = await policy.weights()
        versions = [bucket for bucket in weights.buckets if isinstance(bucket, DeltaVersion)]
        shares.append(sum(each.sent for each in versions) / weights.nbytes)
        if dtype == config.policy.dtype:
            await publish(policy, sampler)
    return shares[STEPS:]


if __name__ == "__main__":
    main()
