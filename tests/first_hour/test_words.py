"""Words of other projects, as somebody types them who comes from there."""

import importlib.util
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
from pydantic import create_model

from meshrl import RunConfig
from meshrl.cli import main
from meshrl.config import Config, dotted
from meshrl.config.mistakes import key_paths
from meshrl.config.neighbours import neighbours
from meshrl.run import shipped_configs
from meshrl.run.jobs import load_script, shipped_scripts

WORDS = [(project, name) for project, words in neighbours().items() for name in words]


@cache
def schema(algorithm: str) -> type[Config]:
    script = load_script(shipped_scripts()[algorithm])
    return create_model("File", __base__=script.schema, algorithm=(str, ...), run=(RunConfig, RunConfig()))


@cache
def keys(algorithm: str) -> Collection[str]:
    return {dotted(path) for path in key_paths(schema(algorithm))}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(list(arguments))
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("project", "name"), WORDS)
def test_each_answer_is_a_key_that_an_algorithm_has(project: str, name: str) -> None:
    word = neighbours()[project][name]
    assert word.keys or word.say
    for key in word.keys:
        assert any(fnmatchcase(each, key) for algorithm in shipped_scripts() for each in keys(algorithm)), key


def test_there_are_answers_for_many() -> None:
    assert len(WORDS) > 150
    assert sum(bool(neighbours()[project][name].keys) for project, name in WORDS) > 120


@pytest.mark.parametrize(("project", "name"), WORDS)
def test_each_word_is_answered_where_it_is_typed(project: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "check", "grpo/quickstart", f"{name}=1")
    key = next(iter(neighbours()[project][name].keys), None)
    assert f"no such key; there is no `{name}` here" in told if key is None else f"`{name}` is `" in told


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("learning_rate=1e-6", "`learning_rate` is `policy.optimizer.lr` here"),
        ("policy.lora.r=8", "`policy.lora.r` is `policy.lora.rank` here"),
        ("beta=0.04", "`beta` is `loss.kl` here: the weight of the KL to `reference`"),
        ("actor_rollout_ref.rollout.n=8", "`actor_rollout_ref.rollout.n` is `sampling.n` here"),
        ("policy.optimizer.learning_rate=1", "`policy.optimizer.learning_rate` is `policy.optimizer.lr` here"),
        ("sampler.torch_dtype='float32'", "`sampler.torch_dtype` is `sampler.dtype` here"),
        ("algorithm.gamma=1", "`algorithm.gamma` is `gae.discount` here"),
        ("gamma=1", "`gamma` is `gae.discount` here, which this algorithm does not have"),
        ("report_to=wandb", "`report_to` is `run.log` here"),
        ("trainer.logger=wandb", "`trainer.logger` is `run.log` here"),
        ("trainer.project_name=mine", "`trainer.project_name` is `run.project` here"),
        ("trainer.experiment_name=mine", "`trainer.experiment_name` is `run.name` here"),
        (
            "gpu_memory_utilization=.5",
            "`gpu_memory_utilization` is `sampler.sglang.memory_share` or `sampler.vllm.memory_share` here",
        ),
        (
            "max_prompt_length=512",
            "`max_prompt_length` is `task.max_prompt_tokens` here: longer prompts are left out, none is cut",
        ),
        ("data.filter_overlong_prompts=true", "`data.filter_overlong_prompts` is `task.max_prompt_tokens` here"),
        ("critic.adam.lr=1e-5", "`critic.adam.lr` is `critic.optimizer.lr` here, which this algorithm does not have"),
        ("rollout.batch_size=64", "`rollout.batch_size` is `prompts` here: it counts prompts"),
        (
            "ds.tensor_parallel_size=2",
            "`ds.tensor_parallel_size` is `policy.axes` here: write policy.axes = { tp = 2 }",
        ),
        ("vllm.tensor_parallel_size=2", "`vllm.tensor_parallel_size` is `sampler.axes` here"),
        ("services.policy.num_replicas=2", "`services.policy.num_replicas` is `sampler.axes` here"),
        ("trainer.training.max_norm=1", "`trainer.training.max_norm` is `policy.optimizer.max_grad_norm` here"),
        ("off_by_n=1", "`off_by_n` is `ahead` here: no trained row is more than that number of publications behind"),
    ],
)
def test_the_answer_says_where_the_key_is_in_this_configuration(
    typed: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"command line: {typed.partition('=')[0].partition('.')[0]}" in (
        found := refused(capsys, "check", "grpo/quickstart", typed)
    )
    assert told in found


def test_a_whole_table_of_another_project_is_answered_key_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'algorithm = "grpo"\n[actor_rollout_ref.rollout]\nn = 8\ntemperature = 1.0\n[trainer]\nsave_freq = 5\n', "utf-8"
    )
    told = refused(capsys, "check", str(file))
    for answer in (
        "`actor_rollout_ref.rollout.n` is `sampling.n` here",
        "`actor_rollout_ref.rollout.temperature` is `sampling.temperature` here",
        "`trainer.save_freq` is `run.checkpoint_every` here",
    ):
        assert answer in told


def test_an_estimator_of_verls_hides_no_other_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys, "check", "grpo/quickstart", "algorithm.adv_estimator=gae", "lr=1", "steps=many", "reward.fn=exact_match"
    )
    for answer in (
        "4 mistakes",
        "command line: algorithm.adv_estimator: no such key; `algorithm.adv_estimator` is `algorithm` here",
        "command line: lr: no such key",
        "command line: steps = 'many'",
        "command line: reward.fn: no such key",
    ):
        assert answer in told


def test_a_key_below_a_table_of_the_file_is_told_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "check", "grpo/quickstart", "policy.engine_args.tensor_parallel_size=2")
    assert "command line: policy.engine_args: no such key; `policy.engine_args.tensor_parallel_size`" in told


def test_a_file_without_an_algorithm_is_told_its_other_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[algorithm]\nadv_estimator = "gae"\n[critic.optim]\nlr = 1\n[run]\nnam = "x"\n[trainer]\nlogger = "wandb"\n',
        "utf-8",
    )
    told = refused(capsys, "check", str(file), "steps=many")
    for answer in (
        "algorithm is missing: write algorithm =",
        "`algorithm.adv_estimator` is `algorithm` here",
        "`critic.optim.lr` is `critic.optimizer.lr` here",
        "run.nam: no such key; did you mean run.name?",
        "`trainer.logger` is `run.log` here",
        "command line: steps = 'many': must be a whole number",
    ):
        assert answer in told
    assert "which this algorithm does not have" not in told
    assert "is missing," not in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "grpo/quickstart", "--steps", "3"], "--steps: keys are set without dashes. Write steps=3"),
        (["check", "grpo/quickstart", "--policy.optimizer.lr=1e-4"], "Write policy.optimizer.lr=1e-4"),
        (["run", "--steps", "3", "grpo/quickstart"], "Write steps=3"),
        (["simulate", "grpo/quickstart", "--prompts", "8"], "Write prompts=8"),
        (["run", "grpo/quickstart", "--resume"], "Write resume=true"),
    ],
)
def test_a_key_that_is_written_as_an_option(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *arguments)


def test_the_list_of_configurations_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == len(shipped_configs()) + 1, "a line is continued on the next"


def test_the_pages_print_the_tables_that_answer() -> None:
    file = Path(__file__).parents[2] / "docs/neighbours.py"
    spec = importlib.util.spec_from_file_location("docs_neighbours", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for project, page in made.PAGES.items():
        assert made.written(project) == page.read_text("utf-8"), "run python docs/neighbours.py"
