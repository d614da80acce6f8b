"""Mistakes in rollouts, in batches, and in the data that a task reads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import meshrl as rl
from meshrl.data import Origin, Source
from meshrl.testing import FakePolicy, FakeSampler, simulate

BATCH = rl.Batch.of(
    tokens=rl.Ragged.of([[1, 2, 3], [4]], np.int32), rewards=np.ones(2, np.float32), answer=["yes", "no"]
)


def nothing_published() -> None:
    async def script() -> None:
        policy, sampler = FakePolicy(rl.PolicyConfig(model="none")), FakeSampler(rl.SamplerConfig(model="none"))
        prompts = (rl.Batch.of(prompt=["?"], answer=["!"], groups=np.array([number])) for number in range(9))
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts, rl.Sampling()) as stream:
            async for batch in stream:
                await policy.update(batch, rl.CrossEntropy())

    simulate(script)


def log_probs_of_two_models() -> None:
    roles: list[Origin] = ["sampler", "trainer"]
    rl.Batch.concat([rl.Batch.of(logprobs=rl.Ragged.of([[-1.0]], np.float32, source=Source(role))) for role in roles])


def writing_into_a_batch() -> None:
    BATCH.rewards[0] = 1


def writing_into_weights() -> None:
    rl.Weights(0, {"bias": np.zeros(2)}).tensors["bias"][0] = 1


def metric_twice() -> None:
    both = rl.Metrics.of(loss=(3.0, 2)) | rl.Metrics.of(loss=(1.0, 1))
    assert not both


def _load(text: str, file: str = "words.jsonl", **config: str | int) -> None:
    Path(file).write_text(text, "utf-8")
    rl.Task.load(rl.TaskConfig.model_validate({"source": file, "held_out": 0, **config}))


MISTAKES: dict[str, Callable[[], object]] = {
    "missing-column": lambda: BATCH.row("reward"),
    "wrong-kind-of-column": lambda: BATCH.row("tokens"),
    "columns-that-disagree": lambda: rl.Batch.of(prompt=["a", "b", "c"], rewards=np.zeros(2, np.float32)),
    "column-of-another-size": lambda: BATCH.assign(advantages=np.zeros(3, np.float32)),
    "tokens-that-disagree": lambda: BATCH.assign(loss_mask=rl.Ragged.of([[False, True], [True]], np.bool_)),
    "padded-tokens": lambda: BATCH.assign(tokens=np.zeros((2, 3), np.int32)),
    "text-in-an-array": lambda: BATCH.assign(prompt=np.array(["a", "b"])),
    "list-of-arrays": lambda: BATCH.assign(hidden=[np.zeros(3), np.zeros(1)]),
    "offsets-that-do-not-fit": lambda: rl.Ragged(np.arange(4), np.array([0, 3])),
    "row-out-of-range": lambda: BATCH.select([0, 2]),
    "short-mask": lambda: BATCH.select([True]),
    "unknown-metric": lambda: rl.Metrics.of(loss=(3.0, 2))["lose"],
    "reward-that-is-infinite": lambda: rl.group_advantages([1.0, float("inf")], [0, 0]),
    "mini-batches-of-nothing": lambda: list(
        rl.minibatches(BATCH.assign(loss_mask=rl.Ragged.of([[0, 0, 0], [0]], np.bool_)), epochs=1, count=2, seed=0)
    ),
    "unknown-source": lambda: _load("question,answer", "words.csv"),
    "missing-data": lambda: rl.Task.load(rl.TaskConfig(source="words.jsonl")),
    "bad-json-line": lambda: _load('{"question": "cat", "answer": "tac"}\n{"question": "dog", "answer"}\n'),
    "line-that-is-no-row": lambda: _load('["cat", "tac"]\n'),
    "no-rows": lambda: _load("\n"),
    "not-parquet": lambda: _load("PARQUET", "words.parquet"),
    "template-key-missing": lambda: _load('{"word": "cat", "answer": "tac"}\n', prompt="{wrd}>"),
    "template-of-a-lone-brace": lambda: _load('{"word": "cat", "answer": "tac"}\n', prompt="{word}: {"),
    "too-many-held-out": lambda: _load('{"question": "cat", "answer": "tac"}\n', held_out=512),
    "options-of-a-file": lambda: rl.Task.load(rl.TaskConfig(source="words.jsonl", options={"size": 10})),
    "task-by-name-without-its-library": lambda: rl.Task.load(rl.TaskConfig(source="lm_eval:gsm8k")),
    "unknown-dataset": lambda: rl.Task.load(rl.TaskConfig(source="reasoning_gym:spell_backwards")),
    "unknown-dataset-option": lambda: rl.Task.load(
        rl.TaskConfig(source="reasoning_gym:spell_backward", options={"max_length": 8})
    ),
}
