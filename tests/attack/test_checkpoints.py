"""Checkpoints in which a bit has turned, or that somebody has edited."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Metrics, Policy, PolicyConfig, Run, RunConfig
from meshrl.errors import DataError
from meshrl.run.checkpoints import Checkpoints
from meshrl.run.config import MeshConfig

FAKE = PolicyConfig(backend="fake", model="none")
STEPS = 6


class Crash(Exception):
    pass


async def train(folder: Path, crash: int = STEPS, every: int = 1) -> list[int]:
    """A run of six steps that is gone on with, and crashes after so many; the steps that were done."""
    table = {"name": "mine", "folder": str(folder), "resume": True, "checkpoint_every": every, "checkpoints_kept": 2}
    done: list[int] = []
    async with Run(RunConfig(**table, meshes={"main": MeshConfig(cpus=0)})) as run:  # type: ignore[arg-type]
        await run.spawn(Policy, FAKE)
        async for step in run.steps(STEPS):
            if step == crash:
                raise Crash
            done.append(step)
            await run.record(Metrics.of(loss=(float(step), 1.0)))
    return done


async def crashed(folder: Path, after: int = 3, every: int = 1) -> Path:
    """The checkpoints of a run that crashed."""
    with capture_logs(), pytest.raises(Crash):
        await train(folder, after, every)
    return folder / "mine/checkpoints"


def edited(file: Path, edit: Callable[[dict[str, object]], object]) -> None:
    """Change what a checkpoint of a version before says, which has no fingerprints."""
    saved = msgspec.json.decode(file.read_bytes().splitlines()[0], type=dict[str, object])
    del saved["fingerprints"]
    edit(saved)
    file.write_bytes(msgspec.json.encode(saved))


async def test_each_bit_counts(tmp_path: Path) -> None:
    """Of run.json and of every other file."""
    folder = await crashed(tmp_path, after=2, every=2)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 1
    for file in files:
        whole = file.read_bytes()
        places = range(0, 8 * len(whole), 1 + len(whole) // 500)
        for place in places:
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(DataError, match="restore that file, or remove"):
                Checkpoints(folder.parent, 2, resume=True)
        for cut in (b"", whole[:-1], whole + b"\n"):
            file.write_bytes(cut)
            with pytest.raises(DataError):
                Checkpoints(folder.parent, 2, resume=True)
        file.write_bytes(whole)
    saved = Checkpoints(folder.parent, 2, resume=True).saved
    assert saved is not None
    assert saved.done == 2


async def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    folder = await crashed(tmp_path)
    state = next(path for path in (folder / "step-000003").rglob("*") if path.is_file() and path.name != "run.json")
    state.write_bytes(state.read_bytes() + b" ")
    with capture_logs() as logs:
        assert await train(tmp_path) == [2, 3, 4, 5]
    told = next(line for line in logs if "is damaged" in line["event"])
    assert f"resuming from {folder}/step-000002" in told["event"]
    assert "differs from what was written with this checkpoint" in told["error"]
    lines = (tmp_path / "mine/metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == list(range(STEPS))
    assert len([path for path in folder.iterdir() if path.name.startswith("damaged-step-000003")]) == 1


@pytest.mark.parametrize("what", ["file", "folder", "added", "lost", "renamed"])
async def test_links_and_other_files_are_refused(tmp_path: Path, what: str) -> None:
    folder = await crashed(tmp_path, after=2, every=2)
    state = next(path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")
    match what:
        case "file":
            shutil.move(state, tmp_path / "elsewhere")
            state.symlink_to(tmp_path / "elsewhere")
        case "folder":
            (state.parent / "more").symlink_to(tmp_path)
        case "added":
            (state.parent / "more").touch()
        case "lost":
            state.unlink()
        case _:
            (folder / "step-000002").rename(folder / "step-000004")
    with pytest.raises(DataError, match=r"is not a plain file|was not written with|is missing|was renamed"):
        await train(tmp_path)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda saved: saved.update(files={"../victim": 0}), r"names the files \.\./victim"),
        (lambda saved: saved.update(step=-1), "Expected `int` >= 0"),
        (lambda saved: saved.update(files={"metrics.jsonl": -5}), "Expected `int` >= 0"),
        (lambda saved: saved.update(data={**saved["data"], "used": [[0, 4], [2, 6]]}), "not ascending ranges"),
        (lambda saved: saved.update(data={**saved["data"], "used": [[4, 2]]}), "not ascending ranges"),
    ],
)
async def test_what_was_edited_by_hand_is_an_error_in_words(
    tmp_path: Path, edit: Callable[[dict[str, object]], object], told: str
) -> None:
    folder = await crashed(tmp_path, after=2, every=2)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    edited(folder / "step-000002/run.json", edit)
    with pytest.raises(DataError, match=told):
        await train(tmp_path)
    assert victim.read_text() == "precious"


async def test_a_checkpoint_of_a_version_before_is_gone_on_with(tmp_path: Path) -> None:
    folder = await crashed(tmp_path, after=2, every=2)
    edited(folder / "step-000002/run.json", lambda _: None)
    assert await train(tmp_path, every=2) == [2, 3, 4, 5]


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"step": "one"}\n'])
async def test_wrong_bytes_in_the_metrics_are_an_error_in_words(tmp_path: Path, line: bytes) -> None:
    folder = await crashed(tmp_path, after=2, every=2)
    metrics = folder.parent / "metrics.jsonl"
    size = metrics.stat().st_size
    metrics.write_bytes((line + metrics.read_bytes())[:size])
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1, is not as a run wrote it"):
        await train(tmp_path)


async def test_a_link_in_place_of_the_metrics_is_not_followed(tmp_path: Path) -> None:
    folder = await crashed(tmp_path, after=2, every=2)
    metrics, victim = folder.parent / "metrics.jsonl", tmp_path / "victim"
    victim.write_bytes(metrics.read_bytes() + b"precious")
    metrics.unlink()
    metrics.symlink_to(victim)
    with pytest.raises(DataError, match=r"metrics\.jsonl is a link"):
        await train(tmp_path)
    assert victim.read_bytes().endswith(b"precious")
