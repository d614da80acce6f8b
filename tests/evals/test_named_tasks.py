"""Tasks by name: prompts and scores are the library's, over samplers of meshrl, with rows of the hub or a file."""

import asyncio
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs

from meshrl import NewModel, PolicyConfig, RewardConfig, TaskConfig
from meshrl.data import Batch
from meshrl.errors import MeshrlError
from meshrl.tasks import Task, harness
from meshrl.tasks.function import FunctionReward
from meshrl_torch.train.one_rank import TorchPolicy
from tests.first_hour.hub_server import Hub, ask, serving
from tests.first_hour.terminal import config_of, done, refused

pytest.importorskip("lm_eval", reason="make test-evals installs it")

TRUE = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
ADD = {"task_id": "0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "", "test": TRUE}
SUMS = [{"question": f"What is {one}+10?", "answer": f"{one}+10.\n#### {one + 10}"} for one in range(8)]
BOXED = [{"problem": f"What is {one}/2?", "solution": rf"It is $\boxed{{\frac{{{one}}}{{2}}}}$."} for one in (1, 3)]
CHOICES = {
    "options": ["yes", "no"],
    "answer": "B",
    "answer_index": 1,
    "cot_content": "A: Let's think step by step. no.",
}
FOLLOW = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [{}, {}]}
HUB: Mapping[str, Mapping[str, Sequence[Mapping[str, object]]]] = {
    "openai/gsm8k": {"main/train": SUMS, "main/test": SUMS[:3]},
    "HuggingFaceH4/MATH-500": {"default/test": BOXED},
    "math-ai/aime25": {"default/test": [{"problem": "What is 7 * 10?", "answer": "70"}]},
    "google/IFEval": {
        "default/train": [{"key": 1, "prompt": "Say it.", **FOLLOW}, {"key": 2, "prompt": "Do.", **FOLLOW}]
    },
    "openai/openai_humaneval": {"openai_humaneval/test": [ADD]},
    "TIGER-Lab/MMLU-Pro": {
        f"default/{split}": [
            {"question_id": at, "question": f"{of}?", "category": of, **CHOICES}
            for of in ("law", "math")
            for at in range(6 if split == "validation" else 1)
        ]
        for split in ("validation", "test")
    },
}
ANSWERS: Mapping[str, Sequence[str]] = {
    "gsm8k": [" 0+10.\n#### 10\n\nQuestion: next", " the answer is 11.", " 12.\n#### 3"],
    "math500": [" $\\frac12$", r"We get \boxed{3/4}."],
    "aime25": [r"<think>\boxed{3}</think>\boxed{70}"],
    "ifeval": ["all in small letters.", "Letters, and Commas."],
    "mmlu_pro_law": [" the answer is (B)."],
}
"""What a model might answer to each row: some right, some wrong, some in another form."""


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with serving() as served:
        for name, splits in HUB.items():
            files = {
                f"{place}.jsonl": "".join(json.dumps(row) + "\n" for row in rows) for place, rows in splits.items()
            }
            configs: dict[str, list[str]] = {}
            for place in splits:
                config, _, split = place.partition("/")
                configs.setdefault(config, []).append(f"  - split: {split}\n    path: {place}.jsonl\n")
            told = "".join(
                f"- config_name: {config}\n  data_files:\n{''.join(each)}" for config, each in configs.items()
            )
            files["README.md"] = f"---\nconfigs:\n{told}---\n"
            served.repositories[f"datasets/{name}"] = {place: text.encode() for place, text in files.items()}
        ask(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(Path("datasets").resolve()))
        yield served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny"))
    new = NewModel(characters=string.printable, hidden_size=16, ffn_size=24, layers=1, heads=2, max_tokens=2048)
    asyncio.run(TorchPolicy(PolicyConfig(model=new)).save(folder))
    return folder


@cache
def folders() -> Mapping[str, Path]:
    """The library's folder of each task and group."""
    root = Path(import_module("lm_eval.tasks").__file__ or "").parent
    line = re.compile(r"""^(?:task|group): *["']?([\w.-]+)["']? *$""", re.MULTILINE)
    found: dict[str, Path] = {}
    for file in sorted(root.rglob("*.yaml")):
        for name in line.findall(file.read_text("utf-8", "replace")):
            found.setdefault(name, root / file.relative_to(root).parts[0])
    return found


def manager(name: str) -> Any:
    """The library's own index, of the folder with a task alone: that of all takes half a minute."""
    return import_module("lm_eval.tasks").TaskManager(include_defaults=False, include_path=str(folders()[name]))


def judged(name: str, prompts: Batch, completions: Sequence[str]) -> Mapping[str, Any]:
    """What the reward of a task gives to completions, with all its measures."""
    given = RewardConfig.model_validate(harness.tables(name, {})["reward"])
    scored = asyncio.run(FunctionReward(given).score(prompts.assign(completion=list(completions))))
    assert not any(scored.objects("reward_error")), scored.objects("reward_error")
    return {
        name: column.tolist()
        for name in scored.names
        if name.startswith("reward") and isinstance(column := scored.columns[name], np.ndarray)
    }


@pytest.mark.parametrize("name", ANSWERS)
def test_prompts_and_scores_are_those_of_the_library(name: str) -> None:
    """Its own evaluator is given a model that answers the same."""
    prompts = Task.load(TaskConfig(source=f"lm_eval:{name}", held_out=0)).train
    answers = ANSWERS[name]
    assert len(prompts) == len(answers)
    ours = judged(name, prompts, answers)

    class Answering(import_module("lm_eval.api.model").LM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            self.asked = [each.args[0] for each in requests]
            said = [answer.rpartition("</think>")[2] for answer in answers]
            for text in requests[0].args[1]["until"]:
                said = [each.partition(text)[0] for each in said]
            return said

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    model = Answering()
    own = harness.named(name)
    evaluator = import_module("lm_eval.evaluator")
    found = evaluator.simple_evaluate(model, tasks=[own], task_manager=manager(own), bootstrap_iters=0)["results"][own]
    assert prompts.objects("prompt") == tuple(model.asked)
    measures = harness.settings_of(name, {}).measures
    first = found[next(key for key in found if "," in key and "stderr" not in key)]
    assert sum(ours["rewards"]) / len(answers) == pytest.approx(first)
    for measure in measures if len(measures) > 1 else ():
        (theirs,) = [
            value for key, value in found.items() if measure in key.replace("-", "_").split(",") and "stderr" not in key
        ]
        assert sum(ours[f"reward_{measure}"]) / len(answers) == pytest.approx(theirs), measure


def test_a_group_has_the_rows_of_each_of_its_tasks(hub: Hub) -> None:
    subjects = ["biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history"]
    subjects += ["law", "math", "other", "philosophy", "physics", "psychology"]
    rows = [{"question_id": 1, "question": f"{of}?", "category": of, **CHOICES} for of in subjects for _ in range(2)]
    files = hub.repositories["datasets/TIGER-Lab/MMLU-Pro"]
    files |= {
        f"default/{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
        for split in ("test", "validation")
    }
    prompts = Task.load(TaskConfig(source="lm_eval:mmlu_pro", options={"num_fewshot": 1}, held_out=0)).train
    shown = [str(prompt) for prompt in prompts.objects("prompt")]
    assert len(shown) == len(rows)
    assert all(
        f"about {of}. Think" in text and text.count(f"{of}?") == 2 for of, text in zip(subjects * 2, shown, strict=True)
    )
    few = [row["question"] for row in harness.rows("mmlu_pro", {"num_fewshot": 1, "rows": 15}, None)]
    assert few == shown[:15]
    found = judged("mmlu_pro", prompts, ["the answer is (B)", *["the answer is A"] * 27])
    assert found["rewards"] == [1.0, *[0.0] * 27]


def group_of(*tasks: str, **aggregation: object) -> str:
    """Write a group of tasks, each from lines of YAML, and return its file."""
    common = (
        "dataset_path: openai/gsm8k\ndataset_name: main\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\nmetric_list:\n"
        "  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
    )
    Path("mine").mkdir(exist_ok=True)
    for at, lines in enumerate(tasks):
        Path(f"mine/own_{at}.yaml").write_text(f"task: own_{at}\n{common}generation_kwargs: {lines}\n", "utf-8")
    table = {"group": "own", "task": [f"own_{at}" for at in range(len(tasks))], **aggregation}
    Path("mine/own.yaml").write_text(json.dumps(table), "utf-8")
    return "mine/own.yaml"


def test_a_group_is_sampled_by_what_its_tasks_share() -> None:
    mine = group_of('{until: ["\\n", "Q:"]}', '{until: ["\\n", "F:"]}')
    assert harness.settings_of(mine, {}) == harness.Settings(("exact_match",), ("\n",), 256)
    mine = group_of('{until: ["\\n"]}', '{until: ["\\n"], max_gen_toks: 9}')
    with pytest.raises(MeshrlError, match=r"own_0 draws 256 tokens and has exact_match, own_1 9 and exact_match"):
        harness.settings_of(mine, {"num_fewshot": 0})


def test_a_group_that_weighs_its_tasks_alike_is_named() -> None:
    measured = [{"metric": "exact_match", "aggregation": "mean", "weight_by_size": False}]
    mine = group_of("{until: []}", "{until: []}", aggregate_metric_list=measured)
    with capture_logs() as logs:
        harness.settings_of(mine, {"num_fewshot": 0, "split": "test"})
    assert any("weighs its tasks alike" in each["event"] for each in logs)


def test_no_row_is_among_its_own_examples() -> None:
    rows = list(harness.rows("gsm8k", {"split": "train", "num_fewshot": 7}, None))
    assert len(rows) == len(SUMS)
    assert all(str(row["question"]).count(f"What is {at}+10?") == 1 for at, row in enumerate(rows))


def test_code_that_a_model_wrote_runs_in_the_sandbox_alone(tmp_path: Path) -> None:
    prompts = Task.load(TaskConfig(source="lm_eval:humaneval", held_out=0)).train
    mark = tmp_path / "mark"
    hostile = f"    open({str(mark)!r}, 'w').write('here')\n    return a + b"
    answers = ["    return a + b\n\nprint(add(1, 1))", "    return a - b", "    import os\n    os._exit(0)", hostile]
    found = judged("humaneval", prompts.select([0] * len(answers)), answers)
    assert found["rewards"][:3] == [1.0, 0.0, 0.0]
    assert not mark.exists()


def test_a_model_is_evaluated_and_what_it_said_is_kept_to_be_read(model: str) -> None:
    out = done("eval", "gsm8k", "--model", model, "--max-tokens", "4", "--n", "2", "task.options.num_fewshot=1").out
    folder = Path("runs/eval-gsm8k")
    found = msgspec.json.decode((folder / "eval.json").read_bytes())
    assert (found["prompts"], found["n"], set(found["pass_at"])) == (3, 2, {"1", "2"})
    assert set(found["measures"]) == {"strict_match", "flexible_extract"}
    assert found["measures"]["strict_match"] == found["greedy"], "a score of 0 and 1 is a share, with its interval"
    assert "flexible_extract" in out
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [line["group"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert all({"reward", "reward_strict_match", "completion", "tokens"} <= line.keys() for line in lines)
    assert all(line["prompt"].count("Question:") == 2 for line in lines)
    done("report", "eval-gsm8k")
    assert "What is 1+10?" in (folder / "report.html").read_text("utf-8")
    assert "does not exist" in refused("eval", "gsm8k", "--model", "nowhere")
    assert [path.name for path in Path("runs").iterdir()] == ["eval-gsm8k"], "a failure leaves nothing"


def test_rows_of_a_file_and_a_run_are_evaluated_as_well(model: str) -> None:
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:2]), "utf-8")
    recipe = (
        "steps=1",
        "prompts=2",
        "sampling.max_tokens=4",
        "task.held_out=1",
        "task.held_out_fraction=0.5",
        "~evaluation",
    )
    printed = done("train", "gsm8k", "--model", model, *recipe).out
    table = config_of("runs/gsm8k")
    assert table["task"]["source"] == "lm_eval:gsm8k"
    assert 'function = "numeric_answer"' in printed
    done("eval", "gsm8k", "gsm8k", "--n", "1", "--rows", "2", "--max-tokens", "2")
    assert json.loads(Path("runs/gsm8k/eval.json").read_bytes())["task"] == "lm_eval:gsm8k"
    done(
        "eval",
        "gsm8k",
        "--model",
        model,
        "--max-tokens",
        "2",
        "task.options.data=mine.jsonl",
        *("run.name=file", "task.options.num_fewshot=0"),
    )
    assert json.loads(Path("runs/file/eval.json").read_bytes())["prompts"] == 2
    told = refused("eval", "gsm8k", "--model", model, "task.options.data=mine.jsonl")
    assert "has the rows of the split 'test', and the 5 examples before each question are of 'train'" in told
    assert "task.options.num_fewshot" in told
    files = '{test="mine.jsonl",train="mine.jsonl"}'
    told = refused("eval", "gsm8k", "--model", model, f"task.options.data={files}")
    assert "gsm8k, row 0: its prompt with 5 examples cannot be made: ValueError" in told
    assert "has no rows to train on" in refused("train", "gsm8k", "--model", model, f"task.options.data={files}")


def test_a_recipe_is_saved_to_be_edited_and_checked(model: str) -> None:
    done("train", "gsm8k", "--model", model, "--save", "mine.toml", "task.held_out=1", "task.held_out_fraction=0.3")
    text = Path("mine.toml").read_text("utf-8")
    assert text.startswith("# GRPO on gsm8k\n")
    done("check", "mine.toml", "evaluation.rows=1")
    assert "no such key" in refused("train", "gsm8k", "--model", model, "--save", "other.toml", "setps=1")
    assert not Path("other.toml").exists()


def test_each_task_that_the_page_names_has_answers_that_a_model_writes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text("utf-8")
    table = page.partition("| Task | Its rows |")[2].partition("\n\n")[0]
    named = [harness.named(name) for name in re.findall(r"`(\w+)`", table)]
    assert len(named) > 25

    def tasks(name: str, index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        own = index[name].cfg
        members = own["task"] if isinstance(own["task"], list) else []
        return [each for member in members for each in tasks(member, index)] if members else [own]

    for name in named:
        for own in tasks(name, manager(name).task_index):
            assert own.get("output_type", "generate_until") == "generate_until", name
            assert own.get("repeats", 1) == 1, name
            assert "class" not in own, name


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("eval", "gsm8kk", "--model", "m"), "did you mean 'gsm8k'? the list is https://github.com/"),
        (("eval", "arc_easy", "--model", "m"), "compares log-likelihoods of given answers (multiple_choice)"),
        (("eval", "humaneval_instruct", "--model", "m", "sampler.chat=true"), "opens the model's answer with a text"),
        (("eval", "humaneval_64", "--model", "m"), "judges 64 completions together"),
        (("train", "aime25", "--model", "m"), "has no rows to train on, only those that it is measured on"),
        (("train", "gsm8k"), "meshrl train gsm8k --model ORG/NAME"),
        (("eval", "gsm8k", "--model", "m", "task.options.splt=x"), "no such key"),
        (("eval", "gsm8k", "--model", "m", "task.options.data=no.jsonl"), "there is no file no.jsonl"),
    ],
)
def test_a_task_that_cannot_be_done_is_refused_in_words(command: tuple[str, ...], told: str) -> None:
    assert told in refused(*command)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *_: object) -> object:
        raise ImportError(name)

    monkeypatch.setattr(harness, "import_module", missing)
    with pytest.raises(MeshrlError, match=r"pip install 'meshrl\[evals\]'"):
        harness.settings_of("unheard_of", {})
