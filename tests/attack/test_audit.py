import json
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.errors import DataError
from meshrl.run import audit_run
from meshrl.testing import FakePolicy, FakeSampler, Lognormal, delayed
from tests.first_hour.terminal import type_in
from tests.run.test_resume_explored import Story

SIZE, STEPS = 4, 8
TASK = rl.Task(
    train=rl.Batch.of(prompt=[f"{n}+1=" for n in range(10)], answer=["?" * (n % 4) for n in range(10)]),
    held_out=rl.Batch.of(prompt=[]),
)
Lines: TypeAlias = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _roles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshrl.testing.FakePolicy", delayed(FakePolicy, update=Lognormal(1, 0.5)))
        patch.setattr("meshrl.testing.FakeSampler", delayed(FakeSampler, generate=Lognormal(0.3, 1)))
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int | None, Path]:
    folder = tmp_path_factory.mktemp("honest")
    return {ahead: play(folder / f"{ahead}", ahead=ahead) for ahead in (None, 0, 1, 2)}


@pytest.fixture
def honest(played: Mapping[int | None, Path], tmp_path: Path) -> Callable[[int | None], Path]:
    return lambda ahead: Path(shutil.copytree(played[ahead], tmp_path / secrets.token_hex(4)))


def play(folder: Path, *, ahead: int | None, until: float = 1000, configured: int = 2, loops: int = 1) -> Path:
    """Begin a run or go on with it, until a virtual second; its folder. `ahead`: None for a loop without a stream."""
    source = "no stream" if ahead is None else "dealt"
    story = Story(ahead or 0, source, keeps=7, later=True, steps=STEPS, loops=loops, size=SIZE, task=TASK)
    with capture_logs():
        story.go_on(str(folder), until, seed=3, resolved={"ahead": configured})
    return folder / "run"


def forged(folder: Path, change: Callable[[Lines], object], file: str = "groups.jsonl") -> None:
    path = folder / file
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def of(lines: Lines, step: int, what: str) -> dict[str, Any]:
    (line,) = (line for line in lines if line["step"] == step)
    return next(each for each in line["happened"] if each["what"] == what)


def breaches(folder: Path) -> str:
    found = audit_run(folder)
    assert not found.holds
    return "\n".join(breach for verdict in found.verdicts for breach in verdict.breaches)


def test_a_loop_without_a_stream_and_streams_keep_their_promises(played: Mapping[int | None, Path]) -> None:
    found = audit_run(played[None])
    assert (found.holds, found.status, found.steps, found.resumed) == (True, "finished", STEPS, 0)
    prompts, versions = found.prompts, found.versions
    assert (len(prompts.taken), len(prompts.trained), len(prompts.open)) == (32, 32, 0)
    assert (versions.largest, versions.bound) == (None, None)
    for ahead in (0, 2):
        found = audit_run(played[ahead])
        assert found.holds, found.verdicts
        assert len(found.verdicts) == 4
        prompts, versions, dropped = found.prompts, found.versions, Counter(found.prompts.dropped.values())
        assert (found.steps, len(prompts.trained), versions.bound, versions.largest) == (
            STEPS,
            SIZE * STEPS,
            ahead,
            ahead,
        )
        assert dropped["filtered"] >= 4
        assert len(prompts.taken) == len(prompts.trained) + sum(dropped.values())
        left = dropped["closed"]
        assert left <= (ahead + 2) * SIZE
        assert (f"{left} left over" in found.verdicts[0].numbers) == (left > 0)
        assert max(map(len, (played[ahead] / "groups.jsonl").read_text().splitlines())) < 1000, "bounded in size"


def test_a_run_that_went_on_keeps_its_promises_and_its_steps_one_by_one(tmp_path: Path) -> None:
    for number, (ahead, loops, until) in enumerate(((None, 1, 7.0), (2, 1, 7.0), (1, 2, 14.0), (1, 2, 23.0))):
        folder = tmp_path / f"{number}"
        play(folder, ahead=ahead, until=until, loops=loops)
        found = audit_run(play(folder, ahead=ahead, loops=loops))
        assert found.holds, found.verdicts
        trained = len(found.prompts.trained)
        assert (found.steps, found.resumed, trained) == (loops * STEPS, 1, loops * SIZE * STEPS), number


def test_a_prompt_that_a_resumed_run_does_not_draw_again_is_found(tmp_path: Path) -> None:
    play(tmp_path, ahead=2, until=4.5)
    folder = play(tmp_path, ahead=2)

    def remember(lines: Lines) -> None:
        begun = max(at for at, line in enumerate(lines) for each in line["happened"] if each["what"] == "begin")
        lines[begun - 1]["under_way"].append([900, 901])

    forged(folder, remember)
    assert "group 900 was in progress at the checkpoint of the resumed run, but is not drawn again" in breaches(folder)


FORGED: list[tuple[int | None, int, str, dict[str, object], str]] = [
    (None, 5, "train", {"groups": [[9, 10], [20, 24]]}, "step 5: group 9 is delivered again: step 2"),
    (1, 4, "deliver", {"groups": [[9, 10], [18, 20], [21, 23]]}, "step 4: group 9 is delivered again: step 2"),
    (1, 3, "deliver", {"groups": [[14, 17]]}, "group 17 was drawn, but is neither delivered, dropped nor in progress"),
    (None, 3, "train", {"groups": [[12, 14]]}, "groups 14 to 15 were drawn, but delivered to no step"),
    (1, 4, "publish", {"version": 2}, "step 4: version 2 is published after version 4"),
    (1, 5, "publish", {"stream": 7}, "step 5: version 6 is published to stream 7, which was never opened"),
    (1, 4, "deliver", {"staleness": 2}, "21, 22 the oldest token is 2 publications behind, and ahead = 1"),
    (1, 4, "deliver", {"version": 0}, "21, 22 the oldest token is 4 publications behind, and ahead = 1"),
    (1, 4, "deliver", {"staleness": 0}, "0 is recorded, but by the versions published since version 3 it is 1"),
]
"""The `ahead` of a run, the step and event that are changed, the change, and the one thing that an audit says."""


def test_an_event_that_was_forged_is_found(honest: Callable[[int | None], Path]) -> None:
    for ahead, step, what, change, told in FORGED:
        folder = honest(ahead)
        forged(folder, lambda lines: of(lines, step, what).update(change))  # noqa: B023 -- called at once
        (breach,) = breaches(folder).splitlines()
        assert breach.endswith(told)
        assert f"step {step}" in breach or ahead is None


def test_lines_that_were_added_or_left_out_are_found(honest: Callable[[int | None], Path]) -> None:
    dropped, stale, out, again, lost = honest(0), honest(1), honest(None), honest(None), honest(None)
    drop = {"what": "drop", "groups": [[0, 1]], "why": "stale"}
    forged(dropped, lambda lines: lines[-1]["happened"].append(drop))
    assert "group 0 is dropped as stale, but was delivered: step 0" in breaches(dropped)
    forged(stale, lambda lines: lines[5].update(staleness_max=3.0), "metrics.jsonl")
    assert breaches(stale) == "step 5: metrics.jsonl has staleness_max = 3, and ahead = 1"
    forged(out, lambda lines: lines.pop(3))
    assert "step 4 comes after step 2 in groups.jsonl" in breaches(out)
    forged(again, lambda lines: lines.insert(4, lines[3]), "metrics.jsonl")
    assert "step 3 comes after step 3 in metrics.jsonl" in breaches(again)
    forged(lost, lambda lines: of(lines, 3, "train").update(groups=[[9, 10], [12, 14]]))
    found = audit_run(lost)
    assert (found.prompts.twice, found.prompts.all_missing) == ({9}, [(14, 16)])


def test_another_bound_than_the_configured_one_is_found(tmp_path: Path) -> None:
    configured = play(tmp_path, ahead=2, configured=1)
    assert breaches(configured) == "stream 0 was opened with ahead = 2, and config.toml has 1"


def test_files_that_cannot_say_are_errors(honest: Callable[[int | None], Path]) -> None:
    folder = honest(1)
    groups = folder / "groups.jsonl"
    content = groups.read_bytes()
    for damaged, words in {
        content.replace(b'"deliver"', b'"deliwer"', 1): r"groups.jsonl, line 1: is not as a run wrote it: Invalid enum",
        content.replace(b'"staleness"', b'"stalenesz"', 1): "line 2: is not as a run wrote it: Object contains unknown",
        content[:-5]: r"line 9: is not as a run wrote it: Input data was truncated",
        content.replace(b'"groups":[[0,', b'"groups":[[-1,', 1): "is not a range of prompts",
        b'{"step":0,"happened":[],"under_way":[[0,1099511627776]],"dealt":[]}\n': "is not a range of prompts",
        b"\xff\n": "line 1: is not as a run wrote it",
        b"": "0 steps and 0 prompts that were delivered to one, so there is nothing to judge",
        content.partition(b"\n")[2]: "begins with step 1",
    }.items():
        groups.write_bytes(damaged)
        with pytest.raises(DataError, match=words):
            audit_run(folder)
    groups.unlink()
    with pytest.raises(DataError, match="nothing says what its steps trained on: the run is of an earlier version"):
        audit_run(folder)


def test_a_run_that_was_killed_is_judged_as_far_as_it_went(honest: Callable[[int | None], Path]) -> None:
    folder = honest(2)
    for file, cut in (("groups.jsonl", b'{"step":5,"happ'), ("metrics.jsonl", b"")):
        lines = (folder / file).read_bytes().splitlines(keepends=True)
        lines = lines[: next(at for at, line in enumerate(lines) if b'"step":4' in line) + 1]
        (folder / file).write_bytes(b"".join(lines) + cut)
    (folder / "summary.json").unlink()
    found = audit_run(folder)
    assert found.holds, found.verdicts
    assert (found.status, found.steps) == ("not ended", 5)
    assert found.prompts.open


def test_the_command_tells_by_its_exit_status(honest: Callable[[int | None], Path]) -> None:
    folder = honest(2)

    def audit(status: int, *words: str) -> None:
        found = type_in("audit", str(folder))
        assert (found.status, [each for each in words if each not in found.out + found.err]) == (status, [])

    stale = "holds   no delivered row is older than the bound: at most 2, ahead = 2"
    audit(0, "8 steps; finished", "holds   each prompt is delivered to one step or dropped: ", "32 delivered", stale)
    forged(folder, lambda lines: of(lines, 4, "publish").update(version=2))
    audit(1, "BROKEN  versions never fall", "step 4: version 2 is published after version 4")
    (folder / "groups.jsonl").unlink()
    audit(2, "error: ", "has no groups.jsonl")
