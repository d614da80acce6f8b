import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from runpy import run_path

import pytest
from pydantic import create_model

from meshrl import RunConfig
from meshrl.config import Config, dotted
from meshrl.config.neighbours import neighbours
from meshrl.config.validation import key_paths
from meshrl.run import description_of, shipped_configs
from meshrl.run.jobs import load_script, shipped_scripts
from tests.first_hour.terminal import FAKES, SMALL, done, refused, type_in

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
    mistakes = ("3 mistakes", "algorithm.adv_estimator: no such key", f"policy.engine_args: no such key; `{engine}`")
    for answer in mistakes:
        assert answer in told


def test_the_list_of_configurations_tells_of_each_and_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    told = done("configs").out
    assert all(name in told and description_of(path) in told for name, path in shipped_configs().items())
    monkeypatch.setenv("COLUMNS", "100")
    lines = done("configs").out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == len(shipped_configs()) + 1, "a line is continued on the next"


def test_the_pages_print_the_tables_that_answer() -> None:
    made = run_path(str(Path(__file__).parents[2] / "docs/neighbours.py"))
    for project, page in made["PAGES"].items():
        assert made["written"](project) == page.read_text("utf-8"), "run python docs/neighbours.py"


SHORT = ("run", "grpo/quickstart", *FAKES, *SMALL, "steps=1", "prompts=2")


def test_what_is_typed_nearly_right() -> None:
    assert re.fullmatch(r"meshrl \d+\.\d+\.\d+\S*\n", done("--version").out)
    Path("mine").mkdir()
    Path("mine/config.toml").write_text("", "utf-8")
    for typed, told in {
        "run mine": "mine: is a folder, not a configuration; did you mean mine/config.toml?",
        "check sft": "or sft/quickstart or sft/quickstart-megatron or sft/quickstart-vllm or sft/shapes?",
        "run dpo": "dpo: is an algorithm, not a configuration; did you mean dpo/quickstart?",
        "new grpo/quickstart z": "no algorithm 'grpo/quickstart' is shipped; did you mean 'grpo'?",
        "new grop .": "error: no algorithm 'grop' is shipped; did you mean 'grpo'?",
        "run zzzzz": "zzzzz: no such file or shipped configuration; the shipped ones are agent/quickstart, ",
        "run grpo/quickstart algorithm=3": 'algorithm is missing: write algorithm = "NAME" (of ',
        "run grpo/quickstart steps 3": "steps 3: a key and its value are one argument. Write steps=3",
    }.items():
        assert told in refused(*typed.split())
    for typed, told in {
        "run grpo/quickstart --steps 3": "--steps: keys are set without dashes. Write steps=3",
        "check grpo/quickstart --policy.optimizer.lr=1e-4": "Write policy.optimizer.lr=1e-4",
        "run --steps 3 grpo/quickstart": "Write steps=3",
        "simulate grpo/quickstart --prompts 8": "Write prompts=8",
        "run grpo/quickstart --resume": "Write resume=true",
    }.items():
        assert told in type_in(*typed.split()).err
    assert type_in("rnu", "x").status == 2
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_evaluation_is_left_out_by_the_command_line_and_an_earlier_one_is_kept() -> None:
    done(*SHORT, "~evaluation")
    assert not Path("runs/quickstart/evaluations.jsonl").exists()
    assert "[evaluation]" not in Path("runs/quickstart/config.toml").read_text("utf-8")
    assert "command line: evaluation = true: must be a table" in refused(*SHORT, "evaluation=true")
    assert "to unset it, write '~evaluation' on the command line" in refused(*SHORT, "evaluation=false")

    done(*SHORT, "run.checkpoint_every=1")
    run, before = Path("runs/quickstart"), b""
    for n, kept in (("2", []), ("2", []), ("1", ["eval-1.json"]), ("3", ["eval-1.json", "eval-2.json"])):
        out = done("eval", "quickstart", "--n", n, "--rows", "4").out
        assert sorted(each.name for each in run.glob("eval-*.json")) == kept
        if kept:
            assert kept[-1] in out
            assert (run / kept[-1]).read_bytes() == before
        before = (run / "eval.json").read_bytes()
    told = "temperature = 0.0: is greedy, but a greedy completion of each prompt is evaluated anyway: leave it out"
    assert told in refused("eval", "quickstart", "--temperature", "0")


def test_a_folder_is_no_source_of_rows() -> None:
    Path("rows").mkdir()
    command = ("check", "grpo/quickstart", *FAKES, "task.source=rows", "task.options={}")
    told = "task source 'rows': is a folder, but rows are read from one file: it has no .jsonl or .parquet file"
    assert told in refused(*command)
    Path("rows/train.jsonl").touch()
    assert "name a file in it, such as rows/train.jsonl" in refused(*command)


def test_mistakes_are_told_by_where_they_are_typed_and_equal_ones_once() -> None:
    check = ("check", "grpo/quickstart", *SMALL)
    told = refused(*check, "policy.model=nowhere", "reward.function=exactly", "task.prompt={wrd}")
    assert "3 mistakes" in told
    for key in ("policy: model", "reward: reward function 'exactly'", "task: meshrl:spell_backward, row 0: prompt"):
        assert f" command line: {key}" in told
    assert "quickstart.toml: policy: model" in refused(*check)

    backends = [f"{role}.backend=nope" for role in ("policy", "sampler", "reference")]
    told = refused(*check, "loss.kl=0.1", *backends)
    assert "command line: policy, sampler, reference: no backend 'nope' is installed" in told
    assert told.count("no backend 'nope'") == 1


def test_a_run_is_meant_by_its_name_where_a_project_has_it(tmp_path: Path) -> None:
    fakes = (*FAKES, "steps=5", "prompts=2", "policy.optimizer.total_steps=5")
    done("new", "grpo", "mine")
    assert "mine is not the folder of a run: none of metrics.jsonl" in refused("report", "mine")
    done("run", "mine/config.toml", *fakes)
    mine = tmp_path / "runs" / "mine"
    assert done("report", "mine").out.splitlines()[0] == "wrote runs/mine/report.html"
    done("audit", "mine")
    done("trace", "mine")
    assert (mine / "trace.json").exists()
    done("simulate", "mine/config.toml", "--from", "mine", *fakes)
    for arguments in (["eval", "mine"], ["serve", "mine"], ["push", "mine", "me/mine"]):
        told = refused(*arguments)
        assert f"{mine} has neither a model" in told
        assert "its policy was a fake, which writes no model: run it with a model" in told
    assert f"{mine} has trained no adapters" in refused("merge", "mine")

    shutil.copy(mine / "metrics.jsonl", "mine")
    both = "mine may be ./mine or runs/mine, and both are folders of runs: write the path of one"
    assert both in refused("report", "mine")
    assert done("report", "./mine").out == "wrote mine/report.html\n"
    assert done("report", "runs/mine").out.startswith("wrote runs/mine/report.html\n")
