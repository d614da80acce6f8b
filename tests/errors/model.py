"""Mistakes in a model's folder, and in what the torch backend is given. Each starts from a good tiny model."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from meshrl import (
    Batch,
    BradleyTerryLoss,
    ClippedLoss,
    Critic,
    CriticConfig,
    CrossEntropy,
    Gae,
    Loss,
    MeshConfig,
    NewModel,
    Policy,
    PolicyConfig,
    Ragged,
    RewardModel,
    RewardTrainingConfig,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    ValueLoss,
    publish,
    rollout,
    score_columns,
)
from meshrl.cli import app
from meshrl.data import Source
from meshrl.losses import TokenLoss

TINY = NewModel(characters="act>", hidden_size=8, ffn_size=8, layers=1, heads=2, max_tokens=16)
FOLDER = Path("tiny")
SOURCES = Source("sampler"), Source.trainer(7)
BATCH = Batch.of(tokens=Ragged.of([[2, 3, 4], [5]], np.int32), loss_mask=Ragged.of([[0, 1, 1], [0]], np.bool_))

ADVANTAGES = np.array([np.inf, 0], np.float32)


async def _save(folder: str = "tiny", model: NewModel = TINY) -> None:
    async with Run(RunConfig()) as run:
        await (await run.spawn(Policy, PolicyConfig(model=model))).save(folder)


def _write(file: str, content: bytes = b"") -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_bytes(content)


def _remove(files: str) -> None:
    for file in FOLDER.glob(files):
        file.unlink()


def _configure(**changes: int) -> None:
    file = FOLDER / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **changes}), "utf-8")


async def _spawn(model: str | NewModel = "tiny", *, chat: bool = False) -> None:
    async with Run(RunConfig()) as run:
        sampler = await run.spawn(Sampler, SamplerConfig(model=model, chat=chat))
        await rollout(sampler, Batch.of(prompt=["cat>"]), Sampling(max_tokens=4))


async def _update(loss: Loss, **columns: Ragged | np.ndarray) -> None:
    async with Run(RunConfig()) as run:
        policy = await run.spawn(Policy, PolicyConfig(model=TINY))
        await policy.update(BATCH.assign(**columns), loss)


# --- where the model is --------------------------------------------------------------------------


def _check(model: str) -> None:
    Path("words.jsonl").write_text('{"question": "cat>", "answer": "tac"}\n', "utf-8")
    Path("mine.toml").write_text(f'algorithm = "sft"\n[task]\nsource = "words.jsonl"\n[policy]\nmodel = "{model}"\n')
    app(args=["check", "mine.toml", "sampler.backend=fake"], standalone_mode=False)


def model_missing() -> None:
    _check("models/tiny")


async def model_of_the_hub() -> None:
    await _spawn("HuggingFaceTB/SmolLM2-135M")


async def model_without_config() -> None:
    await _save()
    _remove("config.json")
    await _spawn()


def package_not_installed() -> None:
    _check("package:llm_smollm3/model.gguf")


async def package_without_the_file() -> None:
    await _spawn("package:meshrl/model.gguf")


# --- what is in it -------------------------------------------------------------------------------


async def config_without_weights() -> None:
    await _save()
    _remove("model.safetensors")
    await _spawn()


async def corrupt_weights() -> None:
    await _save()
    _write("tiny/model.safetensors", (FOLDER / "model.safetensors").read_bytes()[:-100])
    await _spawn()


async def config_of_another_model() -> None:
    await _save()
    _configure(hidden_size=16)
    await _spawn()


async def layers_missing() -> None:
    await _save()
    _configure(num_hidden_layers=2)
    await _spawn()


async def no_language_model() -> None:
    _write("tiny/config.json", b'{"model_type": "vit", "architectures": ["ViTModel"]}')
    await _spawn()


async def corrupt_gguf() -> None:
    _write("tiny.gguf", b"GGUF, almost")
    await _spawn("tiny.gguf")


async def no_tokenizer() -> None:
    await _save()
    _remove("tokenizer*")
    await _spawn()


async def tokenizer_of_another_model() -> None:
    await _save()
    await _save("large", TINY.model_copy(update={"characters": "abcdefghijklmnopqrstuvwxyz>"}))
    _write("tiny/tokenizer.json", Path("large/tokenizer.json").read_bytes())
    await _spawn()


async def no_chat_template() -> None:
    await _save()
    await _spawn(chat=True)


# --- a new model ---------------------------------------------------------------------------------


async def character_twice() -> None:
    await _spawn(TINY.model_copy(update={"characters": "aact>"}))


async def heads_that_do_not_divide() -> None:
    await _spawn(TINY.model_copy(update={"heads": 3}))


# --- what it is given ----------------------------------------------------------------------------


async def unknown_character() -> None:
    await _spawn(TINY.model_copy(update={"characters": "act"}))


async def prompt_too_long() -> None:
    await _spawn(TINY.model_copy(update={"max_tokens": 6}))


async def weights_of_another_model() -> None:
    async with Run(RunConfig()) as run:
        policy = await run.spawn(Policy, PolicyConfig(model=TINY))
        large = TINY.model_copy(update={"hidden_size": 16})
        await publish(policy, await run.spawn(Sampler, SamplerConfig(model=large)))


async def policy_on_two_ranks() -> None:
    async with Run(RunConfig(meshes={"main": MeshConfig(ranks=2)})) as run:
        await run.spawn(Policy, PolicyConfig(model=TINY))


async def column_of_the_loss_missing() -> None:
    await _update(ClippedLoss(), sampler_logprobs=_zeros())


async def no_reference() -> None:
    await _update(ClippedLoss(kl=0.1), sampler_logprobs=_zeros(), advantages=np.ones(2, np.float32))


async def log_probs_of_another_model() -> None:
    sampled = Ragged(_zeros().values, BATCH.tokens.offsets, source=Source("sampler"))
    advantages = np.ones(2, np.float32)
    await _update(ClippedLoss(anchor="trainer"), sampler_logprobs=sampled, logprobs=sampled, advantages=advantages)


async def log_probs_of_later_weights() -> None:
    sampled, later = (Ragged(_zeros().values, BATCH.tokens.offsets, source=source) for source in SOURCES)
    advantages = np.ones(2, np.float32)
    await _update(ClippedLoss(anchor="trainer"), sampler_logprobs=sampled, logprobs=later, advantages=advantages)


async def log_probs_of_whole_rows() -> None:
    columns = {"advantages": np.ones(2, np.float32), "logprobs": np.zeros(2, np.float32)}
    await _update(ClippedLoss(anchor="trainer"), sampler_logprobs=_zeros(), **columns)


async def loss_of_a_critic() -> None:
    await _update(ValueLoss(), values=_zeros(), returns=_zeros())


class Entropy(CrossEntropy):
    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(-logprobs, {"loss": -logprobs.detach()})


async def metric_named_as_the_updates_own() -> None:
    await _update(Entropy())


async def nothing_to_learn() -> None:
    await _update(CrossEntropy(), loss_mask=Ragged.of([[0, 0, 0], [0]], np.bool_))


async def first_token_learned() -> None:
    await _update(CrossEntropy(), loss_mask=Ragged.of([[0, 1, 1], [1]], np.bool_))


async def advantages_that_are_infinite() -> None:
    await _update(ClippedLoss(), sampler_logprobs=Ragged.of([[0.0, -1, -1], [0]], np.float32), advantages=ADVANTAGES)


async def margins_that_are_nan() -> None:
    pairs = Batch.of(
        prompt=["cat>", "cat>"],
        completion=["tac", "cat"],
        groups=np.zeros(2, np.int64),
        preferred=np.array([1, -1], np.int8),
        least_margins=np.full(2, np.nan, np.float32),
    )
    async with Run(RunConfig()) as run:
        judge = await run.spawn(RewardModel, RewardTrainingConfig(model=TINY))
        await judge.update(await score_columns(await judge.token_scores(await judge.encode(pairs))), BradleyTerryLoss())


async def value_head_of_another_model() -> None:
    async with Run(RunConfig()) as run:
        for folder, size in ("tiny", 8), ("small", 4):
            model = TINY.model_copy(update={"hidden_size": size})
            await (await run.spawn(Critic, CriticConfig(model=model))).save(folder)
    Path("small/value_head.safetensors").replace("tiny/value_head.safetensors")
    async with Run(RunConfig()) as run:
        await run.spawn(Critic, CriticConfig(model="tiny"))


async def kl_without_log_probs() -> None:
    async with Run(RunConfig()) as run:
        critic = await run.spawn(Critic, CriticConfig(model=TINY))
        await critic.advantages(BATCH.assign(rewards=np.zeros(2)), Gae(kl=0.1))


async def save_over_other_files() -> None:
    _write("tiny/thesis.tex")
    await _save()


def _zeros() -> Ragged:
    return Ragged(np.zeros(4, np.float32), BATCH.tokens.offsets)


async def _encode(model: str | NewModel) -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    async with Run(RunConfig()) as run:
        await (await run.spawn(Policy, PolicyConfig(model=model))).encode(Batch.of(messages=[turns]))


async def dialogue_without_a_template() -> None:
    await _encode(TINY)


async def template_that_rewrites_turns() -> None:
    await _save()
    latest = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }}>{% endfor %}"
    _write("tiny/chat_template.jinja", latest.encode())
    await _encode("tiny")
