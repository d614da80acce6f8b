import json
import shutil
from pathlib import Path

import pytest

from meshrl.errors import DataError
from meshrl.run import plan_fork
from tests.algorithms.pages import lines, meshrl, write_task

STEPS = 8
NEW = '{ characters = "0123456789+= ", layers = 1, heads = 2, hidden_size = 16, max_tokens = 16 }'
CONFIG = f"""
algorithm = "grpo"
steps = {STEPS}
prompts = 2
task = {{ source = "rows.jsonl", held_out = 2 }}
policy = {{ model = {NEW}, optimizer = {{ lr = 1e-2 }} }}
sampler = {{ model = {NEW} }}
sampling = {{ n = 2, max_tokens = 4 }}
reward = {{ function = "digits.py:reward" }}
run = {{ name = "earlier", engine = "local", checkpoint_every = 3, checkpoints_kept = 9 }}
"""
REWARD = "def reward(prompt, completion, row):\n    return sum(map(str.isdigit, completion)) / 4\n"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_task(Path(), [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(40)])
        Path("digits.py").write_text(REWARD, "utf-8")
        Path("mine.toml").write_text(CONFIG, "utf-8")
        assert meshrl("run", "mine.toml") == 0
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: Path) -> None:
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def numbers(run: str) -> list[dict[str, float]]:
    return lines(Path("runs") / run / "metrics.jsonl")


def weights(run: str) -> bytes:
    return (Path("runs") / run / "model/model.safetensors").read_bytes()


def test_a_fork_without_changes_ends_as_the_run_it_comes_from() -> None:
    for step in (2, STEPS):  # before the first checkpoint, and at the end; 3 is a checkpoint
        assert meshrl("fork", "earlier", "--step", str(step)) == 0
    assert meshrl("fork", "earlier", "--step", "3", "--name", "42") == 0, "a name may look like a number"
    for forked in ("earlier-at-2", "42", f"earlier-at-{STEPS}"):
        assert (numbers(forked), weights(forked)) == (numbers("earlier"), weights("earlier")), forked
        assert meshrl("audit", forked) == 0


def test_a_fork_is_next_to_a_run_that_was_moved_and_leaves_a_damaged_checkpoint_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = Path("kept \N{GRINNING FACE}")
    there.mkdir()
    Path("runs").rename(there / "runs")
    file = next((there / "runs/earlier/checkpoints/step-000006").rglob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert meshrl("fork", str(there / "runs/earlier"), "--step", "7") == 0
    assert "step-000006 is damaged, and an earlier checkpoint is used" in capsys.readouterr().err
    assert not Path("runs").exists()
    (there / "runs").rename("runs")
    assert (numbers("earlier-at-7"), weights("earlier-at-7")) == (numbers("earlier"), weights("earlier"))


def test_a_fork_with_a_change_is_alike_up_to_the_step_and_tells_where_it_comes_from() -> None:
    changes = ["policy.optimizer.lr=1e-3", "loss.clip=0.1", f"steps={STEPS + 2}"]
    assert meshrl("fork", "earlier", "--step", "5", "--name", "slower", *changes) == 0
    earlier, slower = numbers("earlier"), numbers("slower")
    assert slower[:5] == earlier[:5]
    assert len(slower) == STEPS + 2
    assert [line["lr"] for line in slower[5:]] == [1e-3] * 5
    told = json.loads(Path("runs/slower/fork.json").read_bytes())
    assert told == {"run": str(Path("runs/earlier").resolve()), "step": 5, "changed": changes}
    assert weights("slower") != weights("earlier")
    assert numbers("earlier") == earlier  # it is left as it was


def prompts(run: str) -> list[str]:
    return [line["prompt"] for line in lines(Path("runs") / run / "samples.jsonl")]


def test_a_fork_with_another_seed_has_its_prompts_and_draws_from_the_step_on() -> None:
    seven = ("run.seed=7", "run.samples_every=1")
    assert meshrl("run", "mine.toml", "run.name=seven", "steps=5", *seven) == 0
    assert meshrl("fork", "earlier", "--step", "5", "--name", "at-5", *seven) == 0
    assert meshrl("audit", "at-5") == 0
    assert numbers("at-5")[:5] == numbers("earlier")[:5]
    assert numbers("at-5")[5:] != numbers("earlier")[5:]
    assert prompts("at-5")[-4 * (STEPS - 5) :] == prompts("seven")[: 4 * (STEPS - 5)]
    assert meshrl("run", "runs/at-5/config.toml", f"steps={STEPS + 2}") == 0  # it goes on with its new seed
    assert len(numbers("at-5")) == STEPS + 2
    assert prompts("at-5")[-8:] == prompts("seven")[-8:]
    assert meshrl("audit", "at-5") == 0


def content() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_what_cannot_be_forked_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    before = content()
    for arguments, told in (
        (["--step", "9"], "runs/earlier has steps = 8"),
        (["--step", "5", "--name", "earlier"], "earlier exists already"),
        (["--step", "5", "stepz=1"], "did you mean steps?"),
        (["--step", "5", "run.name=mine"], "Name the new run with --name"),
        (["--step", "5", "run . name=mine"], "Name the new run with --name"),
        (["--step", "5", 'run={name="mine"}'], "Name the new run with --name"),
        *((["--step", "5", "--name", name], "write a name") for name in ("a/earlier", "../y", "..", ".", "", "/y")),
    ):
        assert meshrl("fork", "earlier", *arguments) != 0
        assert told in capsys.readouterr().err
    assert content() == before


def test_a_step_that_was_not_made_and_a_folder_in_the_way_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(step: int) -> str:
        assert meshrl("fork", "earlier", "--step", str(step)) != 0
        return capsys.readouterr().err

    folder = Path("runs/earlier-at-5").resolve()
    folder.mkdir()
    assert "interrupted there before step 5, remove it and fork again" in refuses(5)
    (folder / "fork.json").write_bytes(b"{}")
    assert f"to continue this fork: meshrl run {folder / 'config.toml'}" in refuses(5)
    config = Path("runs/earlier/config.toml")
    config.write_text(config.read_text("utf-8").replace(f"steps = {STEPS}", "steps = 100"), "utf-8")
    assert f"has made {STEPS} of its 100 steps, so fork at a step from 1 to {STEPS}" in refuses(60)
    Path("runs/earlier/groups.jsonl").write_bytes(b"")
    assert "has made 0 of its 100 steps, so wait for its first step" in refuses(1)


def test_what_is_removed_or_comes_while_a_fork_is_copied_is_told() -> None:
    planned = plan_fork(Path("runs/earlier"), 3, "new", [])
    Path("runs/new/model").mkdir(parents=True)
    with pytest.raises(DataError, match="runs/new exists by now"):
        planned.begin()
    shutil.rmtree("runs/new")
    shutil.rmtree("runs/earlier/checkpoints")
    with pytest.raises(DataError, match=r"step-000003 was removed while it was copied.*checkpoints_kept"):
        planned.begin()
    assert not [path for path in Path("runs").iterdir() if "new" in path.name]
