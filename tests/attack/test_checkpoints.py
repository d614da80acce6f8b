import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

import meshrl as rl
from meshrl import LocalEngine, Run
from meshrl.errors import ConfigError, Damaged, DataError, SetAside
from meshrl.run import checkpoints
from meshrl.run.checkpoints import Checkpoints
from meshrl.testing import FakePolicy
from tests.run.test_checkpoints import Script, config, counting, lines, run

STEPS = 6


async def train(folder: Path, steps: int = STEPS) -> list[int]:
    seen: list[int] = []
    async with Run(config(folder)) as under_way:
        await counting(steps, seen=seen)(under_way)
    return seen


async def crashed(folder: Path, after: int = 2) -> Path:
    return await run(counting(STEPS, dies_in=after), folder) / "checkpoints"


def state_of(folder: Path) -> Path:
    return next(path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")


def edited(file: Path, used: object = None, **changes: object) -> None:
    saved = msgspec.json.decode(file.read_bytes().splitlines()[0], type=dict[str, Any])
    saved["data"]["used"] = used or saved["data"]["used"]
    content = msgspec.json.encode({**saved, **changes})
    file.write_bytes(content + b"\n" + hashlib.blake2b(content, digest_size=16).hexdigest().encode())


@pytest.mark.parametrize("most", [30, pytest.param(1000, marks=pytest.mark.wide)])
async def test_each_bit_counts(tmp_path: Path, most: int) -> None:
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
    assert sorted(path.name[:19] for path in folder.iterdir()) == ["damaged-step-000004", "step-000004", "step-000006"]
    own = ["damaged-step-000002.txt", "damaged-step-old-keep"]
    (folder / own[0]).touch()
    (folder / own[1]).mkdir()
    with capture_logs() as logs:
        assert await train(tmp_path, steps=STEPS + 2) == [6, 7]
    assert len([line for line in logs if f"removing {folder}/damaged-step-000004" in line["event"]]) == 1
    assert sorted(path.name for path in folder.iterdir()) == [*own, "step-000006", "step-000008"]


TINY = rl.NewModel(characters="abcdefgh12345678>", hidden_size=16, ffn_size=24, layers=2, heads=4, max_tokens=8)


def training(dies_in: int = -1, seen: list[int] | None = None) -> Script:
    return counting(STEPS, dies_in, seen, rl.PolicyConfig(model=TINY))


def tensors_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def turned(file: Path) -> bytes:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return whole


async def test_a_rank_that_finds_damage_sets_the_checkpoint_aside(tmp_path: Path) -> None:
    folder = await run(training(dies_in=4), tmp_path) / "checkpoints"
    (newest,), (before,) = (tensors_of(folder / f"step-00000{step}") for step in (4, 2))
    turned(newest)
    seen: list[int] = []
    told = rf"{newest} is not as it was written: .* differs in its bytes .* the same command resumes from .*step-000002"
    with pytest.raises(DataError, match=told):
        async with Run(config(tmp_path)) as under_way:
            await training(seen=seen)(under_way)
    assert sorted(path.name[:19] for path in folder.iterdir()) == ["damaged-step-000004", "step-000002"]
    whole = turned(before)
    for _ in range(2):
        with pytest.raises(DataError, match="There is no earlier checkpoint: restore that file, or remove"):
            async with Run(config(tmp_path)) as under_way:
                await training(seen=seen)(under_way)
    before.write_bytes(whole)
    async with Run(config(tmp_path)) as under_way:
        await training(seen=seen)(under_way)
    assert seen == [2, 3, 4, 5]


async def test_damage_is_told_by_all_that_resume_together(tmp_path: Path) -> None:
    class Kept(FakePolicy):
        async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
            if self is first:
                raise Damaged("a bad tensor") from KeyError("w")
            await asyncio.sleep(0)
            next(Path(folder).iterdir())  # gone by now

    folder = await crashed(tmp_path, after=4)
    resumed = Checkpoints(folder.parent, 2, resume=True)
    first, second = (Kept(rl.PolicyConfig(backend="fake", model="none")) for _ in range(2))
    told = r"a bad tensor\. The checkpoint is now .*/damaged-step-.*, and the same command resumes from .*/step-000002"
    for actors in ((second, first), (second,)):
        calls = [resumed.adopt("0-policy", each) for each in actors]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            with pytest.raises(SetAside, match=told):
                raise error or AssertionError


async def test_tensors_of_another_size_are_told_before_a_rank_reads_them(tmp_path: Path) -> None:
    (file,) = tensors_of(await run(training(dies_in=2), tmp_path))
    for content in (file.read_bytes()[:-1], file.read_bytes() + b" "):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"{file} differs .* it has {len(content)} bytes, and had"):
            Run(config(tmp_path), engine=LocalEngine())


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
    file = tmp_path / "mine/checkpoints/step-000002/run.json"
    whole = file.read_bytes()
    file.write_bytes(checkpoints._signed(whole.splitlines()[0].replace(b'"contents"', b'"fingerprints"')))
    with pytest.raises(ConfigError, match="was written by an older version of meshrl: it lacks contents"):
        await train(tmp_path)
    file.write_bytes(whole)
    edited(file)
    assert await train(tmp_path) == [2, 3, 4, 5]
    assert victim.read_text() == "precious"


async def test_metrics_that_are_no_file_of_a_run_are_an_error_in_words(tmp_path: Path) -> None:
    metrics, victim = (await crashed(tmp_path)).parent / "metrics.jsonl", tmp_path / "victim"
    whole = metrics.read_bytes()
    for line in (b"\xff\xfe\n", b"[" * 5000 + b"\n", b'{"step": "one"}\n'):
        metrics.write_bytes((line + whole)[: len(whole)])
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: is not as a run wrote it"):
            await train(tmp_path)
    victim.write_bytes(whole + b"precious")
    metrics.unlink()
    metrics.symlink_to(victim)
    with pytest.raises(DataError, match=r"metrics\.jsonl is a link"):
        await train(tmp_path)
    assert victim.read_bytes().endswith(b"precious")
