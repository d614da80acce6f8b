"""Mistakes in a model's folder, and in what the backends `torch` and `megatron` are given, by way of a good model."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

import meshrl as rl
from meshrl.algo import Loss, TokenLoss
from meshrl.cli import app
from meshrl.data import Source
from meshrl.roles import LoraConfig, RoleConfig, with_options
from meshrl.run import MeshConfig
from meshrl_megatron.options import MegatronConfig

TINY = rl.NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
MEGATRON = rl.PolicyConfig(backend="megatron", model=TINY)
VIT = b'{"model_type": "vit", "architectures": ["ViTModel"]}'
FOLDER = Path("tiny")
WEIGHTS = FOLDER / "model.safetensors"
BATCH = rl.Batch.of(tokens=rl.Ragged.of([[2, 3, 4], [5]], np.int32), loss_mask=rl.Ragged.of([[0, 1, 1], [0]], np.bool_))
INFINITE, ONES = np.array([np.inf, 0], np.float32), np.ones(2, np.float32)


def _tiny(**changes: object) -> rl.NewModel:
    return TINY.model_copy(update=changes)


async def _role(role: Callable[..., Any], config: RoleConfig, use: str = "", *arguments: object) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        actor = await run.spawn(role, config)
        if use:
            await getattr(actor, use)(*arguments)


async def _save(folder: str = "tiny", model: rl.NewModel = TINY) -> None:
    await _role(rl.Policy, rl.PolicyConfig(model=model), "save", folder)


def _write(file: str, content: bytes = b"") -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(content)


def _remove(files: str) -> None:
    for file in FOLDER.glob(files):
        file.unlink()


def _configure(**changes: object) -> None:
    file = FOLDER / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **changes}), "utf-8")


async def _sample(model: str | rl.NewModel = "tiny", *, chat: bool = False) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(model=model, chat=chat))
        await rl.rollout(sampler, rl.Batch.of(prompt=["cat>"]), rl.Sampling(max_tokens=4))


async def _spoilt(spoil: Callable[[], object], *, chat: bool = False) -> None:
    await _save()
    spoil()
    await _sample(chat=chat)


async def _given(file: str, content: bytes, model: str) -> None:
    _write(file, content)
    await _sample(model)


async def save_over_other_files() -> None:
    _write("tiny/thesis.tex")
    await _save()


async def _update(loss: Loss, **columns: rl.Ragged | np.ndarray) -> None:
    await _role(rl.Policy, rl.PolicyConfig(model=TINY), "update", BATCH.assign(**columns), loss)


def _check(model: str) -> None:
    Path("words.jsonl").write_text('{"question": "cat>", "answer": "tac"}\n', "utf-8")
    Path("mine.toml").write_text(f'algorithm = "sft"\n[task]\nsource = "words.jsonl"\n[policy]\nmodel = "{model}"\n')
    app(args=["check", "mine.toml", "sampler.backend=fake"], standalone_mode=False)


async def tokenizer_of_another_model() -> None:
    await _save("large", _tiny(characters="abcdefghijklmnopqrstuvwxyz>"))
    await _spoilt(lambda: _write("tiny/tokenizer.json", Path("large/tokenizer.json").read_bytes()))


async def weights_of_another_model() -> None:
    async with rl.Run(rl.RunConfig()) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(model=TINY))
        await rl.publish(policy, await run.spawn(rl.Sampler, rl.SamplerConfig(model=_tiny(hidden_size=16))))


async def _on_two_ranks(config: rl.PolicyConfig) -> None:
    async with rl.Run(rl.RunConfig(meshes={"main": MeshConfig(ranks=2)})) as run:
        await run.spawn(rl.Policy, config)


def _zeros(source: Source | None = None) -> rl.Ragged:
    return rl.Ragged(np.zeros(4, np.float32), BATCH.tokens.offsets, source=source)


async def _update_by_the_trainers(logprobs: rl.Ragged | np.ndarray) -> None:
    sampled = _zeros(Source("sampler"))
    loss = rl.ClippedLoss(anchor="trainer")
    await _update(loss, sampler_logprobs=sampled, logprobs=logprobs, advantages=ONES)


class Entropy(rl.CrossEntropy):
    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(-logprobs, {"loss": -logprobs.detach()})


async def margins_that_are_nan() -> None:
    pairs = rl.Batch.of(prompt=["cat>"] * 2, completion=["tac", "cat"], groups=np.zeros(2, np.int64))
    pairs = pairs.assign(preferred=np.array([1, -1], np.int8), least_margins=np.full(2, np.nan, np.float32))
    async with rl.Run(rl.RunConfig()) as run:
        judge = await run.spawn(rl.RewardModel, rl.RewardTrainingConfig(model=TINY))
        scored = await rl.score_columns(await judge.token_scores(await judge.encode(pairs)))
        await judge.update(scored, rl.BradleyTerryLoss())


async def value_head_of_another_model() -> None:
    for folder, size in ("tiny", 8), ("small", 4):
        await _role(rl.Critic, rl.CriticConfig(model=_tiny(hidden_size=size)), "save", folder)
    Path("small/value_head.safetensors").replace("tiny/value_head.safetensors")
    await _role(rl.Critic, rl.CriticConfig(model="tiny"))


async def kl_without_log_probs() -> None:
    batch = BATCH.assign(rewards=np.zeros(2))
    await _role(rl.Critic, rl.CriticConfig(model=TINY), "advantages", batch, rl.Gae(kl=0.1))


async def _encode(model: str | rl.NewModel) -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    await _role(rl.Policy, rl.PolicyConfig(model=model), "encode", rl.Batch.of(messages=[turns]))


async def template_that_rewrites_turns() -> None:
    await _save()
    latest = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }}>{% endfor %}"
    _write("tiny/chat_template.jinja", latest.encode())
    await _encode("tiny")


def _divide(model: rl.NewModel, experts: int = 1, **sizes: int) -> None:
    from meshrl_megatron.shape import Decoder  # noqa: PLC0415 -- brings Megatron
    from meshrl_torch.model.loading import load  # noqa: PLC0415 -- brings torch

    config = load(rl.PolicyConfig(model=model)).network.config
    Decoder.of(config, "logprobs").check({"dp": 1, "pp": 1, "cp": 1, "tp": 1, **sizes}, MegatronConfig(experts=experts))


def experts_over_dp() -> None:
    from meshrl.mesh import Rank  # noqa: PLC0415 -- with what follows it
    from meshrl_megatron.world import World  # noqa: PLC0415 -- brings Megatron

    World.of(Rank(0, 3, {"dp": 0}, {"dp": 3}), 1, 2)


async def _megatron(**changes: object) -> None:
    await _save()
    _configure(**changes)
    await _role(rl.Policy, rl.PolicyConfig(backend="megatron", model="tiny"))


def virtual_stages_without_a_pipeline() -> object:
    config = MEGATRON.model_copy(update={"model": _tiny(layers=2)})
    return _role(rl.Policy, with_options(config, MegatronConfig(virtual_stages=2)))


def _another_megatron_core(version: str) -> None:
    spec = importlib.util.find_spec("meshrl_megatron.core")
    assert spec
    assert spec.loader
    with (
        patch.object(metadata, "version", lambda _: version),
        patch.object(importlib.util, "find_spec", lambda _: None),
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


MISTAKES: dict[str, Callable[[], object]] = {
    "model-without-config": lambda: _spoilt(lambda: _remove("config.json")),
    "config-without-weights": lambda: _spoilt(lambda: _remove("model.safetensors")),
    "corrupt-weights": lambda: _spoilt(lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:-100])),
    "config-of-another-model": lambda: _spoilt(lambda: _configure(hidden_size=16)),
    "layers-missing": lambda: _spoilt(lambda: _configure(num_hidden_layers=2)),
    "no-tokenizer": lambda: _spoilt(lambda: _remove("tokenizer*")),
    "no-chat-template": lambda: _spoilt(lambda: None, chat=True),
    "no-language-model": lambda: _given("tiny/config.json", VIT, "tiny"),
    "corrupt-gguf": lambda: _given("tiny.gguf", b"GGUF, almost", "tiny.gguf"),
    "model-missing": lambda: _check("models/tiny"),
    "model-of-the-hub": lambda: _sample("HuggingFaceTB/SmolLM2-135M"),
    "package-not-installed": lambda: _check("package:llm_smollm3/model.gguf"),
    "package-without-the-file": lambda: _sample("package:meshrl/model.gguf"),
    "character-twice": lambda: _sample(_tiny(characters="aact>")),
    "heads-that-do-not-divide": lambda: _sample(_tiny(heads=3)),
    "unknown-character": lambda: _sample(_tiny(characters="act")),
    "prompt-too-long": lambda: _sample(_tiny(max_tokens=6)),
    "column-of-the-loss-missing": lambda: _update(rl.ClippedLoss(), sampler_logprobs=_zeros()),
    "no-reference": lambda: _update(rl.ClippedLoss(kl=0.1), sampler_logprobs=_zeros(), advantages=ONES),
    "loss-of-a-critic": lambda: _update(rl.ValueLoss(), values=_zeros(), returns=_zeros()),
    "metric-named-as-the-updates-own": lambda: _update(Entropy()),
    "nothing-to-learn": lambda: _update(rl.CrossEntropy(), loss_mask=rl.Ragged.of([[0, 0, 0], [0]], np.bool_)),
    "first-token-learned": lambda: _update(rl.CrossEntropy(), loss_mask=rl.Ragged.of([[0, 1, 1], [1]], np.bool_)),
    "advantages-that-are-infinite": lambda: _update(rl.ClippedLoss(), sampler_logprobs=_zeros(), advantages=INFINITE),
    "log-probs-of-another-model": lambda: _update_by_the_trainers(_zeros(Source("sampler"))),
    "log-probs-of-later-weights": lambda: _update_by_the_trainers(_zeros(Source.trainer(7))),
    "log-probs-of-whole-rows": lambda: _update_by_the_trainers(np.zeros(2, np.float32)),
    "dialogue-without-a-template": lambda: _encode(TINY),
    "policy-on-two-ranks": lambda: _on_two_ranks(rl.PolicyConfig(model=TINY)),
    "axis-that-megatron-does-not-know": lambda: _on_two_ranks(MEGATRON.model_copy(update={"axes": {"dp": 1, "ep": 2}})),
    "architecture-that-megatron-does-not-know": lambda: _megatron(
        model_type="granite", architectures=["GraniteForCausalLM"]
    ),
    "model-that-megatron-cannot-compute": lambda: _megatron(hidden_act="gelu"),
    "heads-over-tp": lambda: _divide(TINY, tp=4),
    "experts-of-a-model-without": lambda: _divide(TINY, experts=2, dp=2),
    "layers-over-pp": lambda: _divide(_tiny(layers=3), pp=2),
    "another-megatron-core": lambda: _another_megatron_core("0.20.0"),
    "megatron-core-without-triton": lambda: _another_megatron_core("0.19.2"),
    "adapters-on-megatron": lambda: _role(rl.Policy, MEGATRON.model_copy(update={"lora": LoraConfig()})),
}
