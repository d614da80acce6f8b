import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshrl import Task, TaskConfig
from meshrl.run import description_of, find_mistakes, load_job, shipped_configs
from meshrl.run.jobs import shipped_scripts
from meshrl.run.recorder import Recorder
from tests.backends.test_recipes import save_models
from tests.first_hour.chat_model import save_tokenizer
from tests.images.families import folder_of

CONFIGS = shipped_configs()
SEVERAL = "reward={functions = {right = 'numeric_answer', form = 'reasoning_format'}, weights = {form = 0.1}}"
VARIANTS = (
    ("grpo/quickstart", SEVERAL),
    ("grpo/quickstart", "reward={functions = ['exact_match', 'numeric_answer']}"),
    ("grpo/quickstart", "reward={backend = 'torch', model = 'models/judge'}"),
    ("grpo/quickstart", "policy.lora={rank = 4, sync = 'adapters'}", "policy.dtype=bfloat16"),
    ("grpo/quickstart", "policy.backend=fsdp", "policy.fsdp.replicate=2"),
    ("grpo/quickstart", "evaluation={every = 5, temperature = 0.5}", "run.log=['tensorboard']"),
    ("ppo/quickstart", "policy.chat=true", "policy.chat_template_kwargs={enable_thinking = false}"),
    ("grpo/quickstart", "sampler.mesh=other", "run.meshes={other = {ranks = 2, axes = {dp = 2}}}"),
)
"""Values of each kind that the shipped configurations leave at their defaults."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where one stands: each configuration has run there, as one may start from the model that another saved."""
    made = tmp_path_factory.mktemp("runs")
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    save_tokenizer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        sees = Path(folder_of("llava", tmp_path_factory.mktemp("sees")))
        for path in CONFIGS.values():
            job = load_job(path, [])
            run, task = job.run, vars(job.config).get("task")
            own = sees if task and task.images else model
            shutil.copytree(own, made / run.folder / run.name / "model", dirs_exist_ok=True)
        save_models(made)
        yield made


@cache
def held_out(task: str) -> int:
    """How many prompts of a task are held out: many configurations share theirs, which takes a second to make."""
    return len(Task.load(TaskConfig.model_validate_json(task)).held_out)


def test_each_configuration_is_right_says_what_it_is_and_lies_with_its_algorithm() -> None:
    wrong: list[str] = []
    for name, path in CONFIGS.items():
        job = load_job(path, [])
        wrong += [f"{name}: {mistake}" for mistake in find_mistakes(job.config, job.run)]
        task: object = vars(job.config)["task"]
        assert isinstance(task, TaskConfig)
        if held_out(task.model_dump_json()) != task.held_out:
            wrong.append(f"{name}: other prompts are held out than it says")
        if not description_of(path) or job.script.path.stem != path.parent.name:
            wrong.append(f"{name}: does not say what it is, or lies elsewhere than its algorithm")
    assert not wrong, "\n".join(wrong)
    assert {path.parent.name for path in CONFIGS.values()} == set(shipped_scripts())


def test_an_evaluation_beside_training_by_a_sampler_that_lends_its_memory_is_wrong() -> None:
    def mistakes(*overrides: str) -> list[str]:
        sleeps = ["sampler.backend=vllm", "sampler.vllm.sleep=true", f"sampler.vllm.python='{sys.executable}'"]
        return find_mistakes(load_job(CONFIGS["grpo/quickstart"], [*sleeps, *overrides]).config)

    (mistake,) = mistakes("evaluation.every=5")
    assert mistake.startswith("evaluation: sampler.vllm.sleep gives the sampler's memory to training")
    assert mistakes("evaluation.pause_training=true") == []


def test_what_a_run_records_of_its_configuration_reads_back_to_it(folder: Path, tmp_path: Path) -> None:
    wrong: list[str] = []
    for number, (name, *overrides) in enumerate([*((name,) for name in CONFIGS), *VARIANTS]):
        job = load_job(CONFIGS[name], overrides)
        Recorder(tmp_path / f"{number}", job.resolved).close(None)
        again = load_job(tmp_path / f"{number}" / "config.toml", [])
        run = job.run.model_copy(update={"folder": str(folder / "runs")})
        if (again.config.model_dump(), again.run, again.resolved) != (job.config.model_dump(), run, job.resolved):
            wrong.append(f"{name} {overrides}")
    assert wrong == []
