"""Words of other projects, as somebody types them who comes from there."""

from fnmatch import fnmatchcase
from pathlib import Path
from runpy import run_path

import pytest
from pydantic import create_model

from meshrl import RunConfig
from meshrl.config import Config, dotted
from meshrl.config.mistakes import key_paths
from meshrl.config.neighbours import neighbours
from meshrl.run import about, shipped_configs
from meshrl.run.jobs import load_script, shipped_scripts
from tests.first_hour.terminal import done, refused, type_in

ANSWERS = {
    "learning_rate=1e-6": "`learning_rate` is `policy.optimizer.lr` here",
    "policy.lora.r=8": "`policy.lora.r` is `policy.lora.rank` here",
    "beta=0.04": "`beta` is `loss.kl` here: the weight of the KL to `reference`",
    "actor_rollout_ref.rollout.n=8": "`actor_rollout_ref.rollout.n` is `sampling.n` here",
    "policy.optimizer.learning_rate=1": "`policy.optimizer.learning_rate` is `policy.optimizer.lr` here",
    "sampler.torch_dtype='float32'": "`sampler.torch_dtype` is `sampler.dtype` here",
    "gamma=1": "`gamma` is `gae.discount` here, which this algorithm does not have",
    "trainer.project_name=mine": "`trainer.project_name` is `run.project` here",
    "gpu_memory_utilization=.5": "is `sampler.sglang.memory_share` or `sampler.vllm.memory_share` here",
    "max_prompt_length=512": "is `task.max_prompt_tokens` here: longer prompts are left out, none is cut",
    "critic.adam.lr=1e-5": "`critic.adam.lr` is `critic.optimizer.lr` here, which this algorithm does not have",
    "rollout.batch_size=64": "`rollout.batch_size` is `prompts` here: it counts prompts",
    "ds.tensor_parallel_size=2": "`ds.tensor_parallel_size` is `policy.axes` here: write policy.axes = { tp = 2 }",
    "vllm.tensor_parallel_size=2": "`vllm.tensor_parallel_size` is `sampler.axes` here",
    "services.policy.num_replicas=2": "`services.policy.num_replicas` is `sampler.axes` here",
    "off_by_n=1": "`off_by_n` is `ahead` here: no trained row is more than that number of publications behind",
}
"""What is answered to a word, and where the key is in the configuration of grpo."""


def schema(path: Path) -> type[Config]:
    return create_model("File", __base__=load_script(path).schema, algorithm=(str, ...), run=(RunConfig, RunConfig()))


def test_each_answer_is_a_key_that_an_algorithm_has() -> None:
    known = {dotted(path) for script in shipped_scripts().values() for path in key_paths(schema(script))}
    words = {name: word for words in neighbours().values() for name, word in words.items()}
    assert [name for name, word in words.items() if not word.keys and not word.say] == []
    asked = {key for word in words.values() for key in word.keys}
    assert sorted(key for key in asked if not any(fnmatchcase(each, key) for each in known)) == []
    assert (len(words) > 150, sum(bool(word.keys) for word in words.values()) > 120) == (True, True)


def test_each_word_is_answered_where_it_is_typed() -> None:
    wrong: list[str] = []
    for words in neighbours().values():
        told = refused("check", "grpo/quickstart", *(f"{name}=1" for name in words))
        said = {name: f"`{name}` is `" if word.keys else f"there is no `{name}` here" for name, word in words.items()}
        wrong += [name for name, answer in said.items() if answer not in told]
    for typed, answer in ANSWERS.items():
        told = refused("check", "grpo/quickstart", typed)
        if answer not in told or f"command line: {typed.partition('=')[0].partition('.')[0]}" not in told:
            wrong.append(f"{typed}: {told}")
    assert wrong == []


def test_words_beside_others_hide_no_other_mistake() -> None:
    file = """
        run.nam = "x"
        algorithm.adv_estimator = "gae"
        critic.optim.lr = 1
        trainer.logger = "wandb"
        actor_rollout_ref.rollout = { n = 8, temperature = 1.0 }
    """
    Path("mine.toml").write_text(file, "utf-8")
    told = refused("check", "mine.toml", "steps=many")
    for answer in (
        "algorithm is missing: write algorithm =",
        "`algorithm.adv_estimator` is `algorithm` here",
        "`critic.optim.lr` is `critic.optimizer.lr` here",
        "run.nam: no such key; did you mean run.name?",
        "`actor_rollout_ref.rollout.n` is `sampling.n` here",
        "`actor_rollout_ref.rollout.temperature` is `sampling.temperature` here",
        "command line: steps = 'many': must be a whole number",
    ):
        assert answer in told
    assert "which this algorithm does not have" not in told
    assert "is missing," not in told

    engine = "policy.engine_args.tensor_parallel_size"
    told = refused("check", "grpo/quickstart", "algorithm.adv_estimator=gae", "steps=many", f"{engine}=2")
    for answer in (
        "3 mistakes",
        "command line: algorithm.adv_estimator: no such key; `algorithm.adv_estimator` is `algorithm` here",
        "command line: steps = 'many'",
        f"command line: policy.engine_args: no such key; `{engine}`",
    ):
        assert answer in told


def test_a_key_that_is_written_as_an_option() -> None:
    for typed, told in {
        "run grpo/quickstart --steps 3": "--steps: keys are set without dashes. Write steps=3",
        "check grpo/quickstart --policy.optimizer.lr=1e-4": "Write policy.optimizer.lr=1e-4",
        "run --steps 3 grpo/quickstart": "Write steps=3",
        "simulate grpo/quickstart --prompts 8": "Write prompts=8",
        "run grpo/quickstart --resume": "Write resume=true",
    }.items():
        assert told in type_in(*typed.split()).err


def test_the_list_of_configurations_tells_of_each_and_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    told = done("configs").out
    assert all(name in told and about(path) in told for name, path in shipped_configs().items())
    monkeypatch.setenv("COLUMNS", "100")
    lines = done("configs").out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == len(shipped_configs()) + 1, "a line is continued on the next"


def test_the_pages_print_the_tables_that_answer() -> None:
    made = run_path(str(Path(__file__).parents[2] / "docs/neighbours.py"))
    for project, page in made["PAGES"].items():
        assert made["written"](project) == page.read_text("utf-8"), "run python docs/neighbours.py"
