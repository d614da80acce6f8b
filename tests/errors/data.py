"""Mistakes in rollouts, in batches, and in the data that a task reads."""

from pathlib import Path

import numpy as np

from meshrl import (
    Batch,
    CrossEntropy,
    Metrics,
    PolicyConfig,
    Ragged,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    Weights,
    group_advantages,
    minibatches,
    publish,
    rollouts,
)
from meshrl.data import Origin, Source
from meshrl.testing import FakePolicy, FakeSampler, simulate

BATCH = Batch.of(tokens=Ragged.of([[1, 2, 3], [4]], np.int32), rewards=np.ones(2, np.float32), answer=["yes", "no"])


def nothing_published() -> None:
    async def script() -> None:
        policy, sampler = FakePolicy(PolicyConfig(model="none")), FakeSampler(SamplerConfig(model="none"))
        prompts = (Batch.of(prompt=["?"], answer=["!"], groups=np.array([number])) for number in range(9))
        await publish(policy, sampler)
        async with rollouts(sampler, prompts, Sampling()) as stream:
            async for batch in stream:
                await policy.update(batch, CrossEntropy())

    simulate(script)


# --- batches -------------------------------------------------------------------------------------


def missing_column() -> None:
    BATCH.row("reward")


def wrong_kind_of_column() -> None:
    BATCH.row("tokens")


def columns_that_disagree() -> None:
    Batch.of(prompt=["a", "b", "c"], rewards=np.zeros(2, np.float32))


def column_of_another_size() -> None:
    BATCH.assign(advantages=np.zeros(3, np.float32))


def tokens_that_disagree() -> None:
    BATCH.assign(loss_mask=Ragged.of([[False, True], [True]], np.bool_))


def padded_tokens() -> None:
    BATCH.assign(tokens=np.zeros((2, 3), np.int32))


def text_in_an_array() -> None:
    BATCH.assign(prompt=np.array(["a", "b"]))


def list_of_arrays() -> None:
    BATCH.assign(hidden=[np.zeros(3), np.zeros(1)])


def offsets_that_do_not_fit() -> None:
    Ragged(np.arange(4), np.array([0, 3]))


def log_probs_of_two_models() -> None:
    roles: list[Origin] = ["sampler", "trainer"]
    Batch.concat([Batch.of(logprobs=Ragged.of([[-1.0]], np.float32, source=Source(role))) for role in roles])


def row_out_of_range() -> None:
    BATCH.select([0, 2])


def short_mask() -> None:
    BATCH.select([True])


def writing_into_a_batch() -> None:
    BATCH.rewards[0] = 1


def writing_into_weights() -> None:
    Weights(0, {"bias": np.zeros(2)}).tensors["bias"][0] = 1


def unknown_metric() -> None:
    Metrics.of(loss=(3.0, 2))["lose"]


def metric_twice() -> None:
    both = Metrics.of(loss=(3.0, 2)) | Metrics.of(loss=(1.0, 1))
    assert not both


def reward_that_is_not_finite() -> None:
    group_advantages([1.0, float("nan")], [0, 0])


def mini_batches_of_nothing() -> None:
    list(minibatches(BATCH.assign(loss_mask=Ragged.of([[0, 0, 0], [0]], np.bool_)), epochs=1, count=2, seed=0))


# --- tasks ---------------------------------------------------------------------------------------


def _load(text: str, file: str = "words.jsonl", **config: str | int) -> None:
    Path(file).write_text(text, "utf-8")
    Task.load(TaskConfig.model_validate({"source": file, "held_out": 0, **config}))


def unknown_source() -> None:
    _load("question,answer", "words.csv")


def missing_data() -> None:
    Task.load(TaskConfig(source="words.jsonl"))


def bad_json_line() -> None:
    _load('{"question": "cat", "answer": "tac"}\n{"question": "dog", "answer"}\n')


def line_that_is_no_row() -> None:
    _load('["cat", "tac"]\n')


def no_rows() -> None:
    _load("\n")


def not_parquet() -> None:
    _load("PARQUET", "words.parquet")


def template_key_missing() -> None:
    _load('{"word": "cat", "answer": "tac"}\n', prompt="{wrd}>")


def template_of_a_lone_brace() -> None:
    _load('{"word": "cat", "answer": "tac"}\n', prompt="{word}: {")


def too_many_held_out() -> None:
    _load('{"question": "cat", "answer": "tac"}\n', held_out=512)


def options_of_a_file() -> None:
    Task.load(TaskConfig(source="words.jsonl", options={"size": 10}))


def unknown_dataset() -> None:
    Task.load(TaskConfig(source="reasoning_gym:spell_backwards"))


def unknown_dataset_option() -> None:
    Task.load(TaskConfig(source="reasoning_gym:spell_backward", options={"max_length": 8}))
