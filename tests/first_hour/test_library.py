import asyncio
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

import meshrl as rl
from meshrl.errors import ConfigError, DataError
from meshrl.tasks import load_function
from meshrl.tasks.function import FunctionReward, named
from tests.first_hour.terminal import config_of

FAKES = {f"{role}.backend": "fake" for role in ("policy", "sampler")}
ROWS = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(40)]


def judge(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    return float(completion.strip() == row["answer"])


async def longer(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    await asyncio.sleep(0)
    return float(len(completion))


def of_trl(prompts: list[str], completions: list[str], answer: list[str], **columns: list[object]) -> list[float]:
    assert len(prompts) == len(completions) == len(answer) == len(columns["question"])
    return [float(len(completion)) for completion in completions]


async def test_a_task_is_made_of_rows() -> None:
    task = rl.Task.of(ROWS, held_out="all")
    assert len(task.train) + len(task.held_out) == 40
    assert 0 < len(task.held_out) < 20
    assert rl.Task.of(iter(ROWS), prompt="{question} =").train.objects("prompt")[0] == "0 + 1 ="
    with pytest.raises(DataError, match=r"rows, row 0: prompt: the template '\{prompt\}' needs 'prompt'"):
        rl.Task.of(ROWS, prompt="{prompt}")
    with pytest.raises(DataError, match="it has no rows"):
        rl.Task.of([])


async def score(**settings: object) -> list[float]:
    batch = rl.Batch.of(prompt=["1 + 1"] * 2, completion=["2", "three"], answer=["2"] * 2, row=[dict(ROWS[1])] * 2)
    scored = await FunctionReward(rl.RewardConfig.model_validate(settings)).score(batch)
    return [float(each) for each in scored.rewards]


async def test_a_reward_is_a_function_or_several() -> None:
    assert await score(function=judge) == [1, 0]
    assert await score(function=lambda prompt, completion, row: 3.0) == [3, 3]
    assert await score(functions=[judge, longer], weights=[2, 0.5]) == [2.5, 2.5]
    several = rl.RewardConfig.model_validate({"functions": [judge, longer]})
    names = {name: f"{__name__}:{name}" for name in ("judge", "longer")}
    assert several.model_dump(mode="json")["functions"] == names
    wrong: dict[str, dict[str, object]] = {
        "weights: there are 1 for 2 functions": {"functions": [judge, longer], "weights": [2]},
        "several are called judge": {"functions": [judge, judge]},
        "use `functions`": {"function": [judge, longer]},
    }
    for told, settings in wrong.items():
        with pytest.raises(ValueError, match=told):
            rl.RewardConfig.model_validate(settings)


async def test_a_reward_of_trl() -> None:
    async def chats(completions: list[list[dict[str, str]]]) -> list[float | None]:
        return [None if message["content"] == "2" else 1.0 for (message,) in completions]

    assert await score(function=rl.from_trl(of_trl)) == [1, 5]
    assert await score(function=rl.from_trl(chats, chat=True)) == pytest.approx([np.nan, 1], nan_ok=True)
    with pytest.raises(ConfigError, match=r"as TRL's do: give meshrl.from_trl\(function\)"):
        load_function(of_trl)
    with pytest.raises(ConfigError, match="existed only in the memory of its program"):
        load_function(named(lambda prompt, completion, row: 0.0))


def small(**settings: object) -> dict[str, object]:
    return {**FAKES, "steps": 1, "prompts": 4, "sampling.max_tokens": 4, **settings}


async def test_a_run_on_fakes_in_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    several = rl.RewardConfig(functions={"right": judge, "longer": longer}, weights={"longer": 0.1})
    trained = await rl.train("none", ROWS, several, small(steps=2, **{"run.folder": str(tmp_path)}))
    told = capsys.readouterr()
    assert re.search(r"\[info {5}\] step 2/2 reward=\S+ loss=\S+ .*step_s=\S+ .*left=0s", told.err)
    assert "step 2/2" not in told.out
    assert trained.summary["steps"] == 2
    assert trained.folder == tmp_path / "train"
    (file,) = tmp_path.glob("rows-*.jsonl")
    assert len(file.read_bytes().splitlines()) == 40
    assert config_of(trained.folder)["reward"]["functions"]["right"] == f"{__name__}:judge"


async def test_settings_are_dotted_or_in_tables_and_a_model_and_rows_are_what_a_file_has(tmp_path: Path) -> None:
    tables = {"optimizer": {"lr": 1e-3}, "backend": "fake"}
    settings = small(policy=tables, task={"prompt": "{question} ="}, **{"task.held_out": 3}, sampling={})
    del settings["policy.backend"]
    model = {"characters": "0123456789 +", "layers": 2}  # a new model, as a table in a file
    table = config_of((await rl.train(model, ROWS, judge, settings)).folder)
    assert (table["task"]["prompt"], table["task"]["held_out"]) == ("{question} =", 3)
    assert (table["policy"]["optimizer"]["lr"], table["sampling"]["max_tokens"]) == (1e-3, 4)
    assert model.items() <= table["policy"]["model"].items()

    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), "utf-8")
    for rows in ("sums.jsonl", Path("sums.jsonl")):
        folder = f"of {type(rows).__name__}"
        trained = await rl.train("none", rows, "exact_match", small(algorithm="rloo", **{"run.folder": folder}))
        table = config_of(trained.folder)
        assert (table["task"]["source"], table["algorithm"]) == (f"{tmp_path}/sums.jsonl", "rloo")
        assert not list(Path(folder).glob("rows-*"))
    settings = {**FAKES, "algorithm": "sft", "steps": 1, "rows": 4}  # which judges nothing
    assert (await rl.train("none", ROWS, settings=settings)).summary["steps"] == 1


SETTINGS: list[tuple[Mapping[str, object], str]] = [
    ({"lr": 1e-4}, r"settings: lr: no such key; did you mean policy.optimizer.lr\?"),
    ({"evaluation.every": 1, "evaluation.wait": True}, r"no such key; evaluation has .*pause_training"),
    ({"reward.function": "exact_match"}, "settings: reward.function is an argument of train"),
    ({"policy.backend": "torch"}, "settings: policy: model '.*none': there is no folder"),
    ({"task.source": "mine.jsonl"}, "settings: task.source is an argument of train"),
    ({"task": {"source": "mine.jsonl"}}, "settings: task.source is an argument of train"),
    ({"task": {"promt": "{question}"}}, r"settings: task.promt: no such key; did you mean task.prompt\?"),
    ({"steps": 3, "steps.more": 3}, "settings: steps.more: steps is 3 already"),
    ({"algorithm": "sft"}, r"sft has no reward: leave .* out"),
]
TYPO = {"characters": "01", "layer": 2}
UNWRITTEN = [{"question": "a", "answer": np.float32(1)}, {"question": object(), "answer": "b"}]
ARGUMENTS: list[tuple[tuple[object, ...], str]] = [
    ((TYPO, ROWS, judge, FAKES), "policy.model.layer: no such key; did you mean policy.model.layers"),
    (({"new": TYPO}, ROWS, judge, FAKES), "settings: policy.model.new: no such key; policy.model has characters"),
    ((None, ROWS, judge, FAKES), "a model is a folder, a name or a NewModel, not None"),
    (("none", ROWS, None, FAKES), r"grpo needs a reward: give a function \(prompt, completion, row\)"),
    (("none", ROWS, [judge], FAKES), r"several are RewardConfig\(functions="),
    (("nowhere", ROWS, judge, ["steps"]), "settings are keys with values"),
    (("none", "summs.jsonl", judge, FAKES), r"settings: task: task source '.*summs.jsonl': there is no file"),
    (("none", UNWRITTEN, judge, FAKES), "rows, row 1: `question` is <object .*, of the type object: rows are of texts"),
    (("none", [ROWS[0], "1 + 1"], judge, FAKES), r"rows, row 1: must be a mapping such as .*, not a text"),
]


async def test_what_is_wrong_is_refused_before_anything_is_made() -> None:
    train: Any = rl.train
    wrong = [(("none", ROWS, judge, {**FAKES, **settings}), told) for settings, told in SETTINGS]
    for arguments, told in (*wrong, *ARGUMENTS):
        with pytest.raises((ConfigError, DataError), match=told):
            await train(*arguments)
        assert not list(Path().iterdir())


def test_a_new_model_learns() -> None:
    def vowels(prompt: str, completion: str, row: Mapping[str, object]) -> float:
        return completion.count("a") / 6

    rows = [{"question": "".join(letters)} for letters in itertools.product("abcd", repeat=3)]
    model = rl.NewModel(characters="abcd>", hidden_size=16, ffn_size=32, layers=1, heads=2)
    settings = {"task.prompt": "{question}>", "task.answer": "", "sampling.max_tokens": 6, "steps": 12, "prompts": 8}
    trained = asyncio.run(rl.train(model, rows, vowels, {**settings, "policy.optimizer.lr": 3e-2}))
    found: dict[str, Any] = {**trained.summary}
    assert found["reward_sampled_before"] < 0.4
    assert found["reward_sampled_after"] > 0.8
    assert "exact_match_after" not in found
    assert (trained.model / "config.json").is_file()
