import io
import tomllib
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from rich.console import Console
from structlog.testing import capture_logs

import meshrl as rl
from meshrl import Batch, Metrics, Ragged, Run, RunConfig
from meshrl.data import Images
from meshrl.errors import DataError, RankFailed
from meshrl.run import MeshConfig
from meshrl.run.health import Health
from meshrl.run.samples import Samples
from meshrl.run.trackers import Trackers
from tests.data.test_remote_column import Kept
from tests.run.test_checkpoints import lines


def summary(folder: Path) -> dict[str, object]:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, object])


async def recorded(folder: Path, *steps: Mapping[str, float], resolved: Mapping[str, object] | None = None) -> Path:
    async with Run(RunConfig(name="mine", folder=str(folder)), resolved) as run:
        async for step in run.steps(len(steps)):
            await run.record(Metrics.of(), None, **steps[step])
            assert lines(run.folder / "metrics.jsonl")[step]["step"] == step, "it can be read at once"
        run.summary(exact_match_before=np.float64(0.5))
        run.recorder.summary(exact_match_after=np.float32(0.75))
    return run.folder


async def test_a_run_that_finishes_leaves_numbers_a_summary_and_its_configuration(tmp_path: Path) -> None:
    resolved: dict[str, object] = {
        "algorithm": "grpo",
        "policy": {"lr": 1e-4, "betas": (0.9, 0.95), "clip": None},
        "text": 'a "b"\n',
    }
    first_step = {"reward": 0.25, "loss": 0.123456, "tokens": 10, "unwatched": 1.0, "rows": 6, "unknown_rewards": 0.5}
    last_step = {"reward": 0.75, "loss": float("nan"), "tokens": 12, "rows": 2, "unknown_rewards": 0.0}
    with capture_logs() as logs:
        folder = await recorded(tmp_path, first_step, {"reward": 0.5}, last_step, resolved=resolved)
    first, _, last = lines(folder / "metrics.jsonl")
    assert (first["reward"], first["loss"], last["loss"]) == (0.25, 0.123456, None)
    found = summary(folder)
    assert isinstance(last["seconds"], float)
    assert last["seconds"] <= cast("float", found.pop("wall_s")) < last["seconds"] + 60
    ends = {"first_reward": 0.25, "last_reward": 0.75, "exact_match_before": 0.5, "exact_match_after": 0.75}
    assert found == {"status": "finished", "steps": 3, "tokens": 22, "unknown_rewards": 3 / 8, **ends}
    assert not list(folder.glob("*.part"))
    written = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    assert written == {"algorithm": "grpo", "policy": {"lr": 1e-4, "betas": [0.9, 0.95]}, "text": 'a "b"\n'}
    told = [line for line in logs if line["event"].startswith("step ")]
    assert [line["event"] for line in told] == ["step 1/3", "step 3/3"], "the first and the last"
    assert (told[0]["reward"], told[0]["loss"]) == ("0.25", "0.1235")
    assert told[-1]["left"] == "0s"
    assert "unwatched" not in told[0]


async def test_what_a_run_adds_to_the_numbers_of_a_step_and_its_samples(tmp_path: Path) -> None:
    count = 64
    batch = Batch.of(
        prompt=[f"p{index}" for index in range(count)],
        completion=["c"] * count,
        step=np.full(count, 77),
        held_out=np.arange(count) % 2,
        answer=["a"] * count,
        rewards=np.arange(count, dtype=np.float32),
        reward_error=[None] * (count - 1) + ["ValueError: no"],
        tokens=Ragged.of([[1, 2]] * 32 + [[3]] * 32, np.int32),
        staleness=np.array([0, 2, 2, 3] * 16, np.int32),
    )
    batches = iter([batch, batch.select(np.arange(2)).only("prompt"), batch.select(np.arange(0))])
    metrics = Metrics.of(correction=(6.0, 8.0), correction_squared=(9.0, 8.0))
    with capture_logs():
        async with Run(RunConfig(folder=str(tmp_path), samples_every=1)) as run:
            async for _ in run.steps(3):
                await run.record(metrics, next(batches), lr=0.5, seconds=-1.0)
    step = lines(run.folder / "metrics.jsonl")[0]
    assert (step["staleness"], step["staleness_max"], step["effective_sample_size"]) == (1.75, 3.0, 0.5)
    assert (step["rows"], step["tokens"], step["reward"], step["lr"]) == (64.0, 96.0, 31.5, 0.5)
    assert cast("float", step["seconds"]) >= 0, "the run's own keys are not replaced"
    found = lines(run.folder / "samples.jsonl")
    assert len(found) == 18
    said = {"completion": "c", "answer": "a", "reward_error": None, "reward": 0.0, "staleness": 0, "length": 2}
    assert found[0] == {"step": 0, "prompt": "p0", **said, "tokens": {"tokens": [1, 2]}}
    assert found[15]["reward_error"] == "ValueError: no"
    assert found[16:] == [{"step": 1, "prompt": "p0"}, {"step": 1, "prompt": "p1"}]


async def test_samples_are_whole_groups_with_the_numbers_of_tokens_as_far_as_there_is_room(tmp_path: Path) -> None:
    groups, lengths = np.repeat([7, 8, 9, 10], 3), [2, 4, 3, 5] * 3
    tokens = Ragged.of([np.arange(length) for length in lengths], np.int32)
    numbers = np.linspace(-1, 1, len(tokens.values)) / 3
    mask = np.array([at > 0 for length in lengths for at in range(length)])
    batch = Batch.of(
        prompt=[[{"role": "user", "content": f"p{group}"}] for group in groups.tolist()],
        groups=groups,
        tokens=tokens,
        loss_mask=Ragged(mask, tokens.offsets),
        sampler_logprobs=Ragged(numbers.astype(np.float32), tokens.offsets),
        advantages=Ragged(numbers.astype(np.float32), tokens.offsets),
        experts=Ragged(np.zeros((len(numbers), 2, 2), np.int16), tokens.offsets),
        rewards=np.array([np.nan] + [1.0] * 11, np.float32),
        reward_right=np.arange(12, dtype=np.float32),
        row=[{"any": "thing"}] * 12,
    )
    with capture_logs():
        async with Run(RunConfig(folder=str(tmp_path), samples_rows=7, samples_tokens=17)) as run:
            async for _ in run.steps(1):
                await run.record(Metrics.of(loss=(1.0, 1.0)), batch)
    found = lines(run.folder / "samples.jsonl")
    assert [line["group"] for line in found] == [7, 7, 7, 10, 10, 10], "whole groups, the first and the last"
    assert [line["length"] for line in found] == [2, 4, 3, 4, 3, 5]
    assert ["tokens" in line for line in found] == [True, True, True, True, True, False], "16 of 17 tokens are taken"
    second = cast("dict[str, list[float]]", found[1]["tokens"])
    assert second.keys() == {"tokens", "loss_mask", "sampler_logprobs", "advantages"}
    own = numbers[2:6].astype(np.float32).astype(np.float64)
    assert second["sampler_logprobs"] == np.round(own, 5).tolist()
    assert (second["tokens"], second["loss_mask"]) == ([0, 1, 2, 3], [0, 1, 1, 1])
    assert found[1]["advantage"] == pytest.approx(own[1:].mean())
    assert (found[0]["reward"], found[1]["reward"], found[1]["reward_right"]) == (None, 1, 1)
    assert found[0]["prompt"] == "user: p7"


async def test_samples_fetch_from_ranks_what_they_keep() -> None:
    tokens = Ragged(np.arange(9, dtype=np.int32), np.array([0, 2, 6, 9]))
    drawn = Ragged(np.zeros((9, 64), np.float32), tokens.offsets)
    whole = Batch.of(prompt=["a", "b", "c"], embedding=np.zeros((3, 512)), tokens=tokens, top=drawn)
    batch = Batch.join([part.hold(Kept, 0) for part in whole.split(3)])
    for room, rows in ((0, []), (5, [0, 2])):
        Kept.reads.clear()
        found = await Samples(3, room).of(batch)
        assert [(line["prompt"], line["length"]) for line in found] == [("a", 2), ("b", 4), ("c", 3)]
        assert [row for row, line in enumerate(found) if "tokens" in line] == rows
        fetched = [name for number in Kept.reads for name in cast("dict[str, object]", Kept.store[number])]
        assert sorted(fetched) == sorted(["prompt"] * 3 + ["tokens", "top"] * len(rows)), "they lie together"


async def test_a_file_of_samples_that_is_full_takes_no_more_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.run.recorder._MOST", 100)
    batch = Batch.of(prompt=["a"], tokens=Ragged.of([[1] * 20], np.int32))
    with capture_logs() as logs:
        async with Run(RunConfig(folder=str(tmp_path), samples_every=1)) as run:
            async for _ in run.steps(4):
                await run.record(Metrics.of(), batch)
    found = lines(run.folder / "samples.jsonl")
    assert [(line["prompt"], line["length"], "tokens" in line) for line in found] == [
        ("a", 20, step < 2) for step in range(4)
    ]
    (told,) = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert "from step 2 on, rows are kept without their tokens" in told


HISTORIAN = """
import json
from meshrl import Tracker

class Historian(Tracker):
    wants_history = True

    def begin(self, run):
        self.file = run.folder / "told.json"
        self.told = []

    def samples(self, step, rows):
        self.told.append([step, rows])

    def end(self, summary, report):
        self.file.write_text(json.dumps(self.told))
"""


def test_trackers_are_told_again_what_they_get_of_samples(tmp_path: Path) -> None:
    (tmp_path / "historian.py").write_text(HISTORIAN, "utf-8")
    rows = [
        {"step": 0, "prompt": "a", "reward": 1.5, "staleness": 0, "tokens": {"tokens": [1, 2]}},
        {"step": 0, "prompt": "b", "reward": None, "reward_error": "ValueError: no", "row": {"any": "thing"}},
        {"step": 20, "prompt": "c", "completion": "d", "held_out": 1},
        {"step": 20, "prompt": "e", "held_out": True},
    ]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    trackers = Trackers([f"{tmp_path}/historian.py:Historian"])
    trackers.recall(tmp_path)
    trackers.begin(tmp_path, {}, 21)
    trackers.end(None, {})
    assert msgspec.json.decode((tmp_path / "told.json").read_bytes()) == [
        [0, [{"prompt": "a", "reward": 1.5}, {"prompt": "b", "reward_error": "ValueError: no", "reward": None}]],
        [20, [{"prompt": "c", "completion": "d"}]],
    ]
    (tmp_path / "samples.jsonl").write_bytes(b'{"prompt": "a"}\n')
    with pytest.raises(DataError, match=r"samples\.jsonl, line 1: is not as a run wrote it"):
        trackers.recall(tmp_path)


async def test_what_cannot_be_shown_or_measured_is_logged_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(rows: Sequence[Sequence[int]]) -> list[list[str]]:
        return [["ab"[token] for token in row] for row in rows]

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no time has passed")

    monkeypatch.setattr("meshrl.run.samples.token_reader", lambda _: texts)
    monkeypatch.setattr(Health, "see", broken)
    good = Batch.of(completion=["half a pair: \ud83d"], tokens=Ragged.of([[0, 1]], np.int32))
    unknown, negative = (good.assign(tokens=Ragged.of([[0, token]], np.int32)) for token in (7, -1))
    pictured = good.assign(images=Images.of([[b"no image"]]))
    with capture_logs() as logs:
        async with Run(RunConfig(folder=str(tmp_path), samples_every=1)) as run:
            await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
            async for step in run.steps(4):
                await run.record(Metrics.of(), [unknown, negative, pictured, good][step])
            await run.keep_held_out(pictured)
    found = lines(run.folder / "samples.jsonl")
    assert [line["step"] for line in found] == [0, 1, 3]
    assert found[0]["tokens"] == {"tokens": [0, 7]}
    assert found[2]["tokens"] == {"texts": ["a", "b"], "tokens": [0, 1]}
    assert found[2]["completion"] == "half a pair: \\ud83d"
    told = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert [line.partition(":")[0] for line in told if "samples" in line] == [
        "samples.jsonl has tokens without their texts",
        "samples.jsonl has tokens without their texts",
        "samples.jsonl has no rows of step 2, and the run goes on",
        "samples.jsonl has no rows of the evaluation after 4 steps, and the run goes on",
    ]
    assert len([line for line in told if "ZeroDivisionError: no time has passed" in line]) == 1
    assert summary(run.folder)["status"] == "finished"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("no luck"), "failed"), (KeyboardInterrupt(), "interrupted"), (CancelledError(), "interrupted")],
)
async def test_a_run_that_ends_early_says_how(tmp_path: Path, error: BaseException, status: str) -> None:
    async def script() -> None:
        async with Run(RunConfig(folder=str(tmp_path))) as run:
            await run.record(Metrics.of(loss=(1.0, 1.0)))
            raise error

    with pytest.raises(type(error)):
        await script()
    found = summary(tmp_path / "run")
    assert (found["status"], found["steps"], found["first_reward"]) == (status, 1, None)
    assert found["error"] == f"{type(error).__name__}: {error}"


async def test_a_run_that_fails_removes_no_folder_that_another_has_taken_over(tmp_path: Path) -> None:
    async def fail(owner: str | None) -> None:
        async with Run(RunConfig(name="mine", folder=str(tmp_path))) as run:
            run.recorder.leaves_failures = False
            assert run.folder.exists()
            if owner:
                (tmp_path / ".mine.lock").write_text(owner, "utf-8")
            raise ValueError("no luck")

    for owner in (None, "another"):
        with pytest.raises(ValueError, match="no luck"):
            await fail(owner)
        assert (tmp_path / "mine").exists() == bool(owner)


async def test_a_live_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def terminal(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr("meshrl.run.progress.Console", terminal)
    with capture_logs() as logs:
        await recorded(tmp_path, {"reward": 0.5}, {"reward": 0.75})
    assert not [line for line in logs if line["event"].startswith("step ")]
    assert "2/2" in screen.getvalue()
    assert "reward=0.75" in screen.getvalue()


def config(folder: Path) -> rl.RunConfig:
    return rl.RunConfig(folder=str(folder), meshes={"main": MeshConfig(ranks=4, cpus=0, axes={"dp": 4})})


def test_meshes_that_would_wait_for_each_other_in_one_process_have_several() -> None:
    table: list[tuple[dict[str, dict[str, object]], str]] = [
        ({}, "local"),
        ({"main": {"ranks": 4}}, "local"),
        ({"main": {"gpus": 1}}, "processes"),
        ({"main": {}, "sampler": {}}, "processes"),
    ]
    for meshes, engine in table:
        assert rl.RunConfig.model_validate({"meshes": meshes}).engine == engine, meshes
        assert rl.RunConfig.model_validate({"meshes": meshes, "engine": "ray"}).engine == "ray"


async def test_roles_see_the_ranks_of_one_mesh_as_different_axes_and_hand_weights_on(tmp_path: Path) -> None:
    async with rl.Run(config(tmp_path)) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none", axes={"dp": 2, "tp": 2}))
        critic = await run.spawn(rl.Critic, rl.CriticConfig(backend="fake", model="none", axes={"pp": 2, "dp": 2}))
        reference = await run.spawn(rl.Reference, rl.ReferenceConfig(backend="fake", model="none"))
        assert isinstance(policy, rl.Policy)
        assert [rank.axes for rank in rl.ranks(policy)] == [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)]
        assert [rank.axes for rank in rl.ranks(critic)] == [{"pp": pp, "dp": dp} for pp in range(2) for dp in range(2)]
        assert [rank.axes for rank in rl.ranks(reference)] == [{"dp": dp} for dp in range(4)]
        await reference.load(await policy.weights())
        with pytest.raises(RankFailed, match=r"version 3 are of another model: .* and these have strange"):
            await reference.load(rl.Weights(3, {"strange": np.zeros(1)}))


async def test_a_loop_has_no_fewer_than_no_steps(tmp_path: Path) -> None:
    async with rl.Run(config(tmp_path)) as run:
        assert [step async for step in run.steps(0)] == []
        with pytest.raises(DataError, match=r"run\.steps\(-1\): the number of steps must be at least 0"):
            run.steps(-1)
