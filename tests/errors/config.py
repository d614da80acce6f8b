"""Mistakes in a configuration, and in what `meshrl serve` is asked for, made on the command line in an empty folder."""

import sys
from collections.abc import Callable
from pathlib import Path

from meshrl.cli import app

TABLES = """
[task]
source = "words.jsonl"
held_out = 0
[policy]
backend = "fake"
model = "none"
[sampler]
backend = "fake"
model = "none"
[reference]
backend = "fake"
[reward]
"""
WORDS = '{"question": "cat>", "answer": "tac"}\n'


def _meshrl(*arguments: str, **files: str) -> None:
    """A command beside files: `grpo_py="..."` is the content of grpo.py."""
    for name, text in files.items():
        Path(name.replace("_", ".")).write_text(text, "utf-8")
    app(args=arguments, standalone_mode=False)


def _check(top: str = "", tables: str = "", *overrides: str, algorithm: str = "grpo", **files: str) -> None:
    table = f'algorithm = "{algorithm}"\n{top}\n{TABLES}\n{tables}'
    _meshrl("check", "mine.toml", *overrides, words_jsonl=WORDS, mine_toml=table, **files)


def path_from_elsewhere() -> None:
    Path("below").mkdir()
    _meshrl("run", "below/mine.toml", words_jsonl=WORDS, **{"below/mine_toml": f'algorithm = "grpo"\n{TABLES}'})


def _distill(teacher: str) -> None:
    words = '[task]\nsource = "words.jsonl"\nheld_out = 0\n[policy]\nmodel = { characters = "act>" }\n'
    table = f'algorithm = "distill"\n{words}[teacher]\nmodel = {teacher}\n'
    _meshrl("check", "mine.toml", words_jsonl=WORDS, mine_toml=table)


def _in_a_run(*command: str, config: str = '[policy]\nmodel = { characters = "act>" }\n', model: str = "") -> None:
    run = Path("runs/mine")
    (run / "model").mkdir(parents=True)
    (run / "config.toml").write_text(config, "utf-8")
    (run / "metrics.jsonl").touch()
    if model:
        (run / "model" / model).write_text("{}", "utf-8")
    _meshrl(*command, words_jsonl=WORDS)


MISTAKES: dict[str, Callable[[], object]] = {
    "unknown-key": lambda: _check("stepz = 10"),
    "misplaced-key": lambda: _check("lr = 1e-4"),
    "schedule-of-half-a-run": lambda: _check("", "[run]\ndeterministic = true", "run.resume=true"),
    "schedule-without-an-end": lambda: _check(tables='[policy.optimizer]\nschedule = "linear"'),
    "schedule-that-ends-before-the-run": lambda: _check(
        tables='[policy.optimizer]\nschedule = "linear"\ntotal_steps = 100'
    ),
    "missing-key": lambda: _meshrl(
        "check", "mine.toml", mine_toml='algorithm = "grpo"\n' + TABLES.replace("source", "# source")
    ),
    "missing-file": lambda: _meshrl("check", "mien.toml", mine_toml=""),
    "no-algorithm": lambda: _meshrl("check", "mine.toml", mine_toml=TABLES),
    "new-over-own-work": lambda: _meshrl("new", "grpo", ".", grpo_py=""),
    "wrong-type": lambda: _check('steps = "400"'),
    "wrong-choice": lambda: _check(tables='[loss]\nanchor = "trainr"'),
    "out-of-range": lambda: _check(tables="[sampling]\ntemperature = -1.0"),
    "several-mistakes": lambda: _check("step = 10\nprompts = 0.5", "[sampling]\nn = true"),
    "keys-that-belong-together": lambda: _check(tables='[loss]\nnormalise = "constant"'),
    "correction-without-its-anchor": lambda: _check(tables="[loss.correction]\nhigh = 2.0"),
    "reward-without-its-model": lambda: _check(tables='backend = "torch"'),
    "function-with-a-model": lambda: _check(tables='backend = "function"\nmodel = "models/judge"'),
    "reward-of-two-forms": lambda: _check(tables='function = "exact_match"\nmodel = "models/judge"'),
    "new-model-as-a-reward": lambda: _check(tables='model = { characters = "act>" }'),
    "no-override": lambda: _check("", "", "steps"),
    "wrong-override": lambda: _check("", "", "sampling.top_p=most"),
    "override-below-a-value": lambda: _check("", "", "task.source.name=words.jsonl"),
    "not-toml": lambda: _check("steps = "),
    "unknown-configuration": lambda: _meshrl("check", "grpo/quikstart"),
    "unknown-algorithm": lambda: _check(algorithm="grppo"),
    "missing-script": lambda: _check(algorithm="mine.py"),
    "script-without-its-function": lambda: _check(algorithm="mine.py", mine_py="async def main(run, config): ..."),
    "script-without-a-config": lambda: _check(algorithm="mine.py", mine_py="async def mine(run, config): ..."),
    "script-that-raises": lambda: _check(algorithm="mine.py", mine_py="import numpyy"),
    "mesh-of-no-role": lambda: _check(tables="[run.meshes.mian]\nranks = 2"),
    "axes-of-a-role": lambda: _check("", "[run.meshes.main]\nranks = 4", "reference.axes={dp=2, tp=3}"),
    "axes-without-a-size": lambda: _check("", "[run.meshes.main]\nranks = 4", "reference.axes={dp=4, tp=0}"),
    "axes-that-do-not-multiply": lambda: _check(tables="[run.meshes.main]\nranks = 4\naxes = { dp = 2, tp = 3 }"),
    "teacher-with-other-tokens": lambda: _distill('{ characters = "cat>" }'),
    "teacher-that-is-the-policy": lambda: _distill('{ characters = "act>" }'),
    "eval-without-prompts": lambda: _in_a_run("eval", "mine", config=TABLES),
    "nothing-to-serve": lambda: _in_a_run("serve", "mine"),
    "adapters-without-their-file": lambda: _in_a_run("serve", "mine", model="adapter_config.json"),
    "following-for-others": lambda: _in_a_run(
        *("serve", "mine", "--follow", "--host", "0.0.0.0"),  # noqa: S104 -- what is refused
        *("--python", sys.executable),
        model="config.json",
    ),
}
