"""Every shipped configuration is right, as `meshrl check` would say, without a model being loaded."""

import sys
from functools import cache
from pathlib import Path

import pytest

from meshrl import RunConfig, Task, TaskConfig
from meshrl.run import about, find_mistakes, load_job, shipped_configs
from meshrl.run.jobs import shipped_scripts
from tests.backends.test_recipes import save_models
from tests.first_hour.chat_model import save_tokenizer

CONFIGS = shipped_configs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which each configuration has run: one may start from the model that another saved."""
    made = tmp_path_factory.mktemp("runs")
    for path in CONFIGS.values():
        run = load_job(path, [], RunConfig).run
        model = made / run.folder / run.name / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text("{}", "utf-8")
        save_tokenizer(model)
    save_models(made)
    return made


@pytest.fixture
def saved_models(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Where one stands: in that folder."""
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("saved_models")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_right(name: str) -> None:
    job = load_job(CONFIGS[name], [], RunConfig)
    assert find_mistakes(job.config, job.run) == []
    task: object = vars(job.config)["task"]
    assert isinstance(task, TaskConfig)
    assert held_out(task.model_dump_json()) == task.held_out


@cache
def held_out(task: str) -> int:
    """How many prompts of a task are held out: many configurations share theirs, which takes a second to make."""
    return len(Task.load(TaskConfig.model_validate_json(task)).held_out)


@pytest.mark.usefixtures("saved_models")
def test_an_evaluation_beside_training_by_a_sampler_that_lends_its_memory_is_wrong() -> None:
    def mistakes(*overrides: str) -> list[str]:
        sleeps = ["sampler.backend=vllm", "sampler.vllm.sleep=true", f"sampler.vllm.python='{sys.executable}'"]
        return find_mistakes(load_job(CONFIGS["grpo/quickstart"], [*sleeps, *overrides], RunConfig).config)

    (mistake,) = mistakes("evaluation.every=5")
    assert mistake.startswith("evaluation: sampler.vllm.sleep gives the sampler's memory to training")
    assert mistakes("evaluation.pause_training=true") == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_says_what_it_is_and_lies_with_its_algorithm(name: str) -> None:
    job = load_job(CONFIGS[name], [], RunConfig)
    assert about(CONFIGS[name])
    assert job.script.path.stem == CONFIGS[name].parent.name


def test_each_algorithm_has_a_configuration() -> None:
    assert {path.parent.name for path in CONFIGS.values()} == set(shipped_scripts())
