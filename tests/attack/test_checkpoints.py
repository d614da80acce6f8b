"""Checkpoints in which a bit has turned, or that somebody has edited."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import LocalEngine, Run
from meshrl.errors import DataError
from tests.run.test_checkpoints import config, counting, lines, run

STEPS = 6


async def train(folder: Path) -> list[int]:
    """Go on with a run until its sixth step; the steps that were done."""
    seen: list[int] = []
    async with Run(config(folder)) as under_way:
        await counting(STEPS, seen=seen)(under_way)
    return seen


async def crashed(folder: Path, after: int = 2) -> Path:
    """The checkpoints of a run that was killed in the step after so many."""
    return await run(counting(STEPS, dies_in=after), folder) / "checkpoints"


def state_of(folder: Path) -> Path:
    """The first file of an actor's state in this folder."""
    return next(path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")


def edited(file: Path, used: object = None, **changes: object) -> None:
    """Change what a checkpoint of a version before says, which has no fingerprints."""
    saved = msgspec.json.decode(file.read_bytes().splitlines()[0], type=dict[str, Any])
    del saved["fingerprints"]
    saved["data"]["used"] = used or saved["data"]["used"]
    file.write_bytes(msgspec.json.encode({**saved, **changes}))


@pytest.mark.parametrize("most", [30, pytest.param(1000, marks=pytest.mark.wide)])
async def test_each_bit_counts(tmp_path: Path, most: int) -> None:
    """Of run.json and of every other file, as far as so many of each file tell."""
    folder = await crashed(tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 1
    for file in files:
        whole = file.read_bytes()
        for place in range(0, 8 * len(whole), 1 + 8 * len(whole) // most):
            changed = bytearray(whole)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(DataError, match="restore that file, or remove"):
                Run(config(tmp_path), engine=LocalEngine())
        for other in (b"", whole[:-1], whole + b"\n"):
            file.write_bytes(other)
            with pytest.raises(DataError):
                Run(config(tmp_path), engine=LocalEngine())
        file.write_bytes(whole)
    assert await train(tmp_path) == [2, 3, 4, 5]


async def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    folder = await crashed(tmp_path, after=4)
    state = state_of(folder / "step-000004")
    state.write_bytes(state.read_bytes() + b" ")
    with capture_logs() as logs:
        assert await train(tmp_path) == [2, 3, 4, 5]
    told = next(line for line in logs if "is damaged" in line["event"])
    assert f"resuming from {folder}/step-000002" in told["event"]
    assert "differs from what was written with this checkpoint" in told["error"]
    assert [line["step"] for line in lines(tmp_path / "mine/metrics.jsonl")] == list(range(STEPS))
    assert len([path for path in folder.iterdir() if path.name.startswith("damaged-step-000004")]) == 1


async def test_links_and_other_files_are_refused(tmp_path: Path) -> None:
    await crashed(tmp_path)
    for what in ("file", "folder", "added", "lost", "renamed"):
        here = tmp_path / what
        shutil.copytree(tmp_path / "mine", here / "mine")
        state = state_of(here / "mine/checkpoints")
        match what:
            case "file":
                shutil.move(state, here / "elsewhere")
                state.symlink_to(here / "elsewhere")
            case "folder":
                (state.parent / "more").symlink_to(tmp_path)
            case "added":
                (state.parent / "more").touch()
            case "lost":
                state.unlink()
            case _:
                (here / "mine/checkpoints/step-000002").rename(here / "mine/checkpoints/step-000004")
        with pytest.raises(DataError, match=r"is not a plain file|was not written with|is missing|was renamed"):
            await train(here)


async def test_what_was_edited_by_hand_is_an_error_in_words(tmp_path: Path) -> None:
    await crashed(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    edits: list[tuple[dict[str, object], str]] = [
        ({"files": {"../../victim": 0}}, r"names the files \.\./\.\./victim"),
        ({"step": -1}, "Expected `int` >= 0"),
        ({"files": {"metrics.jsonl": -5}}, "Expected `int` >= 0"),
        ({"used": [[0, 4], [2, 6]]}, "not ascending ranges"),
        ({"used": [[4, 2]]}, "not ascending ranges"),
    ]
    for number, (changes, told) in enumerate(edits):
        here = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "mine", here / "mine")
        edited(here / "mine/checkpoints/step-000002/run.json", **changes)
        with pytest.raises(DataError, match=told):
            await train(here)
    edited(tmp_path / "mine/checkpoints/step-000002/run.json")
    assert await train(tmp_path) == [2, 3, 4, 5], "of a version before"
    assert victim.read_text() == "precious"


async def test_metrics_that_are_no_file_of_a_run_are_an_error_in_words(tmp_path: Path) -> None:
    metrics, victim = (await crashed(tmp_path)).parent / "metrics.jsonl", tmp_path / "victim"
    whole = metrics.read_bytes()
    for line in (b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"step": "one"}\n'):
        metrics.write_bytes((line + whole)[: len(whole)])
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 1, is not as a run wrote it"):
            await train(tmp_path)
    victim.write_bytes(whole + b"precious")
    metrics.unlink()
    metrics.symlink_to(victim)
    with pytest.raises(DataError, match=r"metrics\.jsonl is a link"):
        await train(tmp_path)
    assert victim.read_bytes().endswith(b"precious")
