"""Tasks of lm-evaluation-harness, by name: their prompts as rows, and the library's own scores as rewards.

The library makes the prompts, extracts the answers and judges them. Samplers of meshrl draw, and the sandbox runs code
that a model wrote.
"""

import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
from pydantic import Field

from meshrl import log
from meshrl.config import Config, Table, validate
from meshrl.errors import ConfigError, DataError, described, did_you_mean
from meshrl.tasks.sandbox import check_safe, run_tests_here

NAME: Final = "lm_eval"
ALIASES: Final = {"math500": "hendrycks_math500", "math": "hendrycks_math", "bbh": "bbh_cot_zeroshot"}
"""Short names of tasks that the library calls otherwise."""
_Options: TypeAlias = Mapping[str, object]
_INSTALL: Final = "pip install 'meshrl[evals]'"
_LIST: Final = "the list is https://github.com/EleutherAI/lm-evaluation-harness/tree/main/lm_eval/tasks"
_HEADING: Final = re.compile(r"""^(?:task|group):[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
"""The line of a task's file that has the name of the task or group."""
_SEED: Final = 1234
"""The library's own seed for the choice of examples."""
_LENGTH: Final = 256
"""New tokens of a completion at most, for a task that does not say so, as in the library."""
_CLOSE: Final = "</think>"
_WRITES: Final = "generate_until"
"""The library's word for tasks in which a model writes its answer."""


class TaskOptions(Config):
    """The keys of `task.options` for a task of lm-evaluation-harness."""

    split: Literal["test", "train"] = "test"
    """The rows: those that the task is measured on, or those to train on."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question. Default: the task's."""
    data: str | Mapping[str, str] | None = None
    """A .jsonl or .parquet file with the rows of `split`, instead of the hub. Or a file for each split of the dataset,
    which examples of another split need."""
    rows: Annotated[int, Field(ge=1)] | None = None
    """The number of rows, in turn from each task of a group. Default: all."""


class Settings(NamedTuple):
    """How a task is sampled and judged."""

    measures: tuple[str, ...]
    """Names of its scores of one completion. The first is its reward."""
    stop: tuple[str, ...]
    """Texts that end a completion: those that all tasks of a group share."""
    max_tokens: int
    """New tokens of a completion at most."""


def rows(name: str, options: _Options, count: int | None) -> Iterator[dict[str, object]]:
    """Yield the rows of a task, or those of a group's tasks in turn.

    A row has the prompt as `question`, the `answer`, and `lm_eval`, which judges.

    Raises ConfigError if the library or the task is missing, DataError for a task that completions cannot answer, and
    for a split that it does not have.
    """
    given = _validated(name, options)
    each = [_rows_of(name, task, given) for task in _tasks(name, _key(options)).values()]
    dealt = (row for turn in zip_longest(*each) for row in turn if row is not None)
    yield from islice(dealt, given.rows if count is None else min(count, given.rows or count))


def _rows_of(name: str, task: Any, given: TaskOptions) -> Iterator[dict[str, object]]:
    shots = task.config.num_fewshot or 0 if given.num_fewshot is None else given.num_fewshot
    docs, own = _docs(task, given), _check_shots(task, given, shots)
    task.set_fewshot_seed(_SEED)
    for number, doc in enumerate(docs):
        try:
            prompt = _prompt(task, doc, shots, own=own)
            answer = _answer(task, doc)
        except Exception as error:
            raise DataError(
                f"{NAME}:{task.config.task}, row {number}: its prompt with {shots} examples cannot be made: "
                f"{described(error)}: lower task.options.num_fewshot, or give rows with the dataset's columns"
            ) from error
        yield {"question": prompt, "answer": answer, NAME: {"source": name, "task": task.config.task, "doc": dict(doc)}}


def settings_of(name: str, options: _Options) -> Settings:
    """Return how a task is sampled and judged. Raises like `rows`, and DataError for a group of unlike tasks."""
    _validated(name, options)
    each = [_settings(task) for task in _tasks(name, _key(options)).values()]
    (first, own), *others = each
    for other, its in others:
        if (its.measures, its.max_tokens) != (own.measures, own.max_tokens):
            raise DataError(
                f"{NAME}:{name}: its tasks are sampled or judged in different ways: {first} draws {own.max_tokens} "
                f"tokens and has {', '.join(own.measures)}, {other} {its.max_tokens} and {', '.join(its.measures)}: "
                "take one of its tasks"
            )
    # Each completion is cut at its own task's texts before it is judged.
    shared = tuple(text for text in own.stop if all(text in its.stop for _, its in others))
    return own._replace(stop=shared)


def _settings(task: Any) -> tuple[str, Settings]:
    limit = int((task.config.generation_kwargs or {}).get("max_gen_toks", _LENGTH))
    return str(task.config.task), Settings(tuple(_measures(task)), tuple(text for text in _until(task) if text), limit)


def named(text: str) -> str:
    """Return the library's name of a task. ConfigError, with the nearest names, if it has none of this name."""
    name = ALIASES.get(text, text)
    if not Path(name).is_file() and _folder_of(name) is None:
        known = _index()
        hint = did_you_mean(name, [*known, *ALIASES])
        raise ConfigError(
            f"{NAME}:{text}: lm-evaluation-harness has no task of this name among its {len(known):,}; "
            f"{hint and f'{hint} '}{_LIST}"
        )
    return name


def check_trains(name: str, options: _Options) -> None:
    """Raise DataError for a task without rows to train on that it is not measured on."""
    given = _validated(name, options).model_copy(update={"split": "train"})
    for task in _tasks(name, _key(options)).values():
        _docs(task, given)


def check_chat(name: str, options: _Options) -> None:
    """Raise DataError for a task that opens the answer itself. A chat template puts a whole prompt into a question."""
    for task in _tasks(name, _key(options)).values():
        if task.config.gen_prefix:
            raise DataError(
                f"{NAME}:{task.config.task}: opens the model's answer with a text of its own (gen_prefix), which a "
                "chat template would put into the question: leave `chat` out, or take a task without one"
            )


def tables(name: str, options: _Options) -> Table:
    """Return the tables `task`, `reward` and `sampling` of a configuration for a task. Raises like `rows`."""
    known = settings_of(name, options)
    return {
        "task": {"source": f"{NAME}:{name}", "options": dict(options), "held_out": 0},
        "reward": reward_of(known.measures),
        "sampling": {"max_tokens": known.max_tokens, "stop": list(known.stop)},
    }


def reward_of(measures: Sequence[str]) -> Table:
    """Return a table `reward` with all measures of a task. The first counts."""
    if len(measures) == 1:
        return {"function": NAME}
    return {
        "functions": {measure: f"{NAME}:{measure}" for measure in measures},
        "weights": {measure: float(at == 0) for at, measure in enumerate(measures)},
    }


def scorer(function: str) -> Callable[[str, str, Mapping[str, object]], float]:
    """Return the reward `lm_eval`, the first measure of the row's task, or `lm_eval:MEASURE`."""
    measure = function.partition(":")[2]

    def lm_eval(prompt: str, completion: str, row: Mapping[str, object]) -> float:  # noqa: ARG001 -- a reward's
        found = row.get(NAME)
        if not isinstance(found, dict):
            raise ValueError(f'the row has no {NAME!r}: set task.source = "{NAME}:TASK"')
        given = cast("Mapping[str, object]", found)
        doc = msgspec.json.encode(given["doc"])
        scores = _scores(str(given["source"]), str(given["task"]), doc, completion)
        if measure and measure not in scores:
            raise ValueError(f"{given['task']} has no measure {measure!r}: it has {', '.join(scores)}")
        return scores[measure] if measure else next(iter(scores.values()))

    return lm_eval


def _validated(name: str, options: _Options) -> TaskOptions:
    return validate(TaskOptions, options, f"{NAME}:{name}: task.options")


def _key(options: _Options) -> bytes:
    return msgspec.json.encode({key: value for key, value in options.items() if key != "rows"})


@lru_cache(maxsize=1024)
def _scores(source: str, name: str, doc: bytes, completion: str) -> Mapping[str, float]:
    """Judge a completion once for all measures. `doc`: the task's own row, as JSON."""
    task, row = _judging(source, name, doc), msgspec.json.decode(doc)
    answer = completion.rpartition(_CLOSE)[2]
    for text in _until(task):
        answer = answer.partition(text)[0] if text else answer
    made = import_module(f"{NAME}.api.instance").Instance(
        request_type=_WRITES, doc=row, arguments=(), idx=0, metadata=(name, 0, 1), resps=[answer]
    )
    for each in task._filters:
        each.apply([made])
    found: dict[str, float] = {}
    by_filter: dict[str, Mapping[str, Any]] = {}
    for measure, (metric, by) in _measures(task).items():
        if by not in by_filter:
            by_filter[by] = task.process_results(row, [made.filtered_resps[by]])
        found[measure] = _value(task, metric, by_filter[by])
    return found


def _value(task: Any, metric: str, scored: Mapping[str, Any]) -> float:
    if metric in scored:
        return float(scored[metric])
    if len(task._metric_fn_list) == len(scored) == 1:  # a function has a name, and what it measures another
        return float(next(iter(scored.values())))
    raise ValueError(f"{task.config.task} has the scores {', '.join(scored)}, and none is named {metric!r}")


def _measures(task: Any) -> Mapping[str, tuple[str, str]]:
    """Return metric and filter by the name of a measure, for those that are means over completions and grow."""
    mean = import_module(f"{NAME}.api.metrics").mean
    grows, joined = task.higher_is_better(), task.aggregation()
    metrics = [name for name in task._metric_fn_list if joined[name] is mean and grows.get(name, True)]
    filters = [each.name for each in task._filters]

    def measure_name(metric: str, by: str) -> str:
        parts = (by,) if len(metrics) == 1 < len(filters) else (metric, by)[: len(filters)]
        return re.sub(r"\W+", "_", "_".join(parts))

    return {measure_name(metric, by): (metric, by) for metric in metrics for by in filters}


def _until(task: Any) -> Sequence[str]:
    until = (task.config.generation_kwargs or {}).get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)


def _answer(task: Any, doc: Any) -> str | list[str]:
    if isinstance(task.config.doc_to_target, int):  # a place for nothing
        return ""
    target = task.doc_to_target(doc)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    return [*map(str, target)] if isinstance(target, list) else str(target)


def _prompt(task: Any, doc: Any, shots: int, *, own: bool) -> str:
    """Return the text that asks a row. `own`: the examples are of the asked rows, so leave out the row itself."""
    sampler = getattr(task, "sampler", None)
    if own:  # the library does so for some of its tasks alone
        task.sampler = _LeavingOut(sampler, doc)
    try:
        return str(task.fewshot_context(doc, num_fewshot=shots, gen_prefix=task.doc_to_prefix(doc)))
    finally:
        task.sampler = sampler


class _LeavingOut:
    """Chooses examples other than the row that is asked."""

    def __init__(self, sampler: Any, doc: Any) -> None:
        self._sampler, self._doc = sampler, doc

    def sample(self, n: int, **_: object) -> Any:
        return self._sampler.sample(n=n, eval_doc=self._doc)


def _check_shots(task: Any, given: TaskOptions, shots: int) -> bool:
    """Return whether the examples are of the asked rows. DataError if one file would be the rows of two splits."""
    examples, own_split = _example_split(task), _split(task, given.split)
    if shots and isinstance(given.data, str) and examples not in (None, own_split):
        raise DataError(
            f"{NAME}:{task.config.task}: task.options.data = {given.data!r} has the rows of the split {own_split!r}, "
            f"and the {shots} examples before each question are of {examples!r}: set task.options.num_fewshot = 0, or "
            f'name a file for each split: data = {{ {own_split} = "FILE", {examples} = "OTHER" }}'
        )
    return shots > 0 and examples == own_split


def _example_split(task: Any) -> str | None:
    """Return the split that a task's examples are of, by the library's rule. None if the task names examples itself."""
    config, shown = task.config, task.fewshot_cfg
    if shown.split is not None:
        return str(shown.split)
    if config.fewshot_config is not None and shown.samples is not None:
        return None
    return str(config.training_split or config.validation_split or config.test_split)


def _split(task: Any, split: str) -> str:
    config = task.config
    return str(config.training_split if split == "train" else config.test_split or config.validation_split)


def _trains(task: Any, data: str | Mapping[str, str] | None) -> bool:
    trained, measured = _split(task, "train"), _split(task, "test")
    if task.config.training_split is None or trained == measured:
        return False
    files = [data.get(split) for split in (trained, measured)] if isinstance(data, Mapping) else []
    return len({Path(file).resolve() for file in files if file}) == len([file for file in files if file])


def _docs(task: Any, given: TaskOptions) -> Any:
    if given.split == "test":
        return task.eval_docs
    if not _trains(task, given.data):
        raise DataError(
            f"{NAME}:{task.config.task}: has no rows to train on, only those that it is measured on: train on another "
            "task, such as gsm8k or hendrycks_math"
        )
    return task.training_docs()


def _root() -> Path:
    return Path(str(_library("tasks").__file__)).parent


@cache
def _folder_of(name: str) -> Path | None:
    """Return the library's folder with a task or group. The library's own index of all takes half a minute."""
    near = sorted(each for each in _root().iterdir() if each.is_dir() and name.startswith(each.name))
    return next((each for each in near if name in _named_in(each)), None) or _index().get(name)


@cache
def _index() -> Mapping[str, Path]:
    """Return the folder of each task and group."""
    found: dict[str, Path] = {}
    for folder in sorted(each for each in _root().iterdir() if each.is_dir()):
        for name in _named_in(folder):
            found.setdefault(name, folder)
    return found


@cache
def _named_in(folder: Path) -> Sequence[str]:
    texts = (file.read_text("utf-8", "replace") for file in sorted(folder.rglob("*.yaml")))
    return [name for text in texts for name in _HEADING.findall(text)]


def _library(part: str) -> Any:
    # It warns of what its tasks leave to defaults.
    logging.getLogger(NAME).setLevel(logging.ERROR)
    try:
        return import_module(f"{NAME}.{part}")
    except ImportError as error:
        raise ConfigError(f"tasks by name are those of lm-evaluation-harness: {_INSTALL} ({error})") from error


def _build(source: str, name: str, overrides: Mapping[str, object]) -> Mapping[str, Any]:
    """Build a task, or those of a group, with other keys of its configuration. Raises what its code raises.

    `source`: the file or the library's name of what has it. `name`: its own name, or the source again.
    """
    path, library = Path(source).resolve(), _library("tasks")
    folder = path.parent if path.is_file() else _folder_of(source)
    manager = library.TaskManager(include_defaults=False, include_path=str(folder))
    known = manager.task_index
    if (entry := known.get(name)) is None:
        entry = next(each for each in known.values() if each.yaml_path == path)
    _check_writes(f"{NAME}:{name}", (entry.cfg or {}).get("output_type", _WRITES))
    with _code_in_sandbox():
        made = manager._factory.build(entry, overrides=dict(overrides), registry=known)
    loaded = manager.load(made)
    for group, own in loaded["groups"].items():
        if any(not each.weight_by_size for each in own.aggregate_metric_list or ()):
            log.warning(f"{NAME}:{group}: the library's score of this group weighs its tasks alike, and here rows do")
    return cast("Mapping[str, Any]", loaded["tasks"])


@cache
def _tasks(name: str, options: bytes) -> Mapping[str, Any]:
    """Load a task, or those of a group, with their rows."""
    given = TaskOptions.model_validate(msgspec.json.decode(options))
    own = named(name)
    overrides = {} if given.data is None else {"custom_dataset": _reader(given.data), "dataset_kwargs": None}
    source = f"{NAME}:{name}"
    try:
        made = _build(own, own, overrides)
    except (ConfigError, DataError):
        raise
    except Exception as error:
        fetched = isinstance(error, OSError) and given.data is None
        remedy = (
            ". Rows of a file need no hub: task.options.data=rows.jsonl task.options.num_fewshot=0" if fetched else ""
        )
        raise ConfigError(f"{source}: cannot be loaded: {described(error)}{remedy}") from error
    for task in made.values():
        _check(source, task)
    return made


_JUDGES: Final[dict[tuple[str, str], Any]] = {}


def _judging(source: str, name: str, doc: bytes) -> Any:
    """Return a task that judges, without its dataset: of one row."""
    if (known := _JUDGES.get((source, name))) is None:
        datasets: Any = import_module("datasets")
        one = datasets.Dataset.from_list([msgspec.json.decode(doc)])
        overrides = {
            "custom_dataset": lambda **_: _Splits(lambda _: one),
            "dataset_kwargs": None,
            "process_docs": None,
            "num_fewshot": 0,
        }
        (known,) = _build(named(source), name, overrides).values()
        _JUDGES[source, name] = known
    return known


class _Splits(dict[str, Any]):
    """A dataset whose splits are read when they are asked for."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, split: str) -> Any:
        self[split] = self._read(split)
        return self[split]


def _reader(data: str | Mapping[str, str]) -> Callable[..., _Splits]:
    """Return a function that reads splits from files."""

    def read(split: str) -> Any:
        file = data if isinstance(data, str) else data.get(split)
        if file is None or not Path(file).is_file():
            raise DataError(f"task.options.data: there is no file {file or f'for the split {split!r}'}")
        made: Any = import_module("datasets").Dataset
        if file.endswith(".parquet"):
            return made.from_parquet(file)
        lines = Path(file).read_bytes().splitlines()
        return made.from_list([msgspec.json.decode(line) for line in lines if line.strip()])

    return lambda **_: _Splits(read)


def _check(source: str, task: Any) -> None:
    """Raise DataError for a task that no completion answers, or whose code meshrl does not keep apart."""
    where = f"{source}: {task.config.task}"
    _check_writes(where, task.OUTPUT_TYPE)
    if task.config.repeats > 1:
        raise DataError(f"{where} judges {task.config.repeats} completions together: take the task of one, and `--n`")
    if getattr(task, "MULTIMODAL", False):
        raise DataError(f"{where} shows images or sounds, and prompts of these tasks are text")
    if not _measures(task):
        raise DataError(f"{where} has no score of a single completion: {', '.join(task.aggregation())} join them all")
    if getattr(task, "UNSAFE_CODE", False):
        metrics = [each.get("metric") for each in task.config.metric_list or ()]
        if callable(task.config.process_results) or not metrics or not all(map(_uses_sandbox, metrics)):
            raise DataError(f"{where} runs what a model wrote by code of its own, without the sandbox")
        check_safe()


def _check_writes(where: str, kind: str) -> None:
    """Raise DataError for a task in which a model does not write its answer."""
    if kind != _WRITES:
        raise DataError(
            f"{where} compares log-likelihoods of given answers ({kind}), and here a model's completions are judged: "
            "take a task in which the model writes its answer, such as mmlu_pro, arc_challenge_chat, "
            "gpqa_diamond_cot_zeroshot or bbh"
        )


def _uses_sandbox(metric: object) -> bool:
    return any(isinstance(each, _CodeEval) for each in getattr(metric, "__globals__", {}).values())


class _CodeEval:
    """Stands in for the metric `code_eval`, which runs code in processes without limits."""

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **_: object
    ) -> tuple[dict[str, float], dict[int, object]]:
        """Return the share of programs that pass their tests, as `pass@1`. MachineFault if the sandbox did not work."""
        right = [
            run_tests_here(code, [tests]).passed()
            for tests, codes in zip(references, predictions, strict=True)
            for code in codes
        ]
        return {f"pass@{each}": sum(right) / len(right) for each in k if each == 1}, {}


@contextmanager
def _code_in_sandbox() -> Generator[None]:
    """Give the library's tasks the sandbox for `code_eval`, while they are loaded."""
    metrics: Any = import_module("evaluate")
    load = metrics.load
    metrics.load = lambda path, *given, **named: _CodeEval() if path == "code_eval" else load(path, *given, **named)
    try:
        yield
    finally:
        metrics.load = load
