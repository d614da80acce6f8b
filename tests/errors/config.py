"""Mistakes in a configuration, made on the command line in an empty folder."""

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


def _meshrl(*arguments: str) -> None:
    app(args=arguments, standalone_mode=False)


def _check(top: str = "", tables: str = "", *overrides: str, algorithm: str = "grpo") -> None:
    Path("words.jsonl").write_text(WORDS, "utf-8")
    Path("mine.toml").write_text(f'algorithm = "{algorithm}"\n{top}\n{TABLES}\n{tables}', "utf-8")
    _meshrl("check", "mine.toml", *overrides)


def _script(code: str) -> None:
    Path("mine.py").write_text(code, "utf-8")
    _check(algorithm="mine.py")


def unknown_key() -> None:
    _check("stepz = 10")


def misplaced_key() -> None:
    _check("lr = 1e-4")


def path_from_elsewhere() -> None:
    Path("below").mkdir()
    Path("words.jsonl").write_text(WORDS, "utf-8")
    Path("below/mine.toml").write_text(f'algorithm = "grpo"\n{TABLES}', "utf-8")
    _meshrl("run", "below/mine.toml")


def schedule_of_half_a_run() -> None:
    _check("", "[run]\ndeterministic = true", "run.resume=true")


def schedule_without_an_end() -> None:
    _check(tables='[policy.optimizer]\nschedule = "linear"')


def schedule_that_ends_before_the_run() -> None:
    _check(tables='[policy.optimizer]\nschedule = "linear"\ntotal_steps = 100')


def wrong_type() -> None:
    _check('steps = "400"')


def wrong_choice() -> None:
    _check(tables='[loss]\nanchor = "trainr"')


def out_of_range() -> None:
    _check(tables="[sampling]\ntemperature = -1.0")


def missing_key() -> None:
    Path("mine.toml").write_text('algorithm = "grpo"\n' + TABLES.replace("source", "# source"), "utf-8")
    _meshrl("check", "mine.toml")


def several_mistakes() -> None:
    _check("step = 10\nprompts = 0.5", "[sampling]\nn = true")


def keys_that_belong_together() -> None:
    _check(tables='[loss]\nnormalise = "constant"')


def correction_without_its_anchor() -> None:
    _check(tables="[loss.correction]\nhigh = 2.0")


def reward_without_its_model() -> None:
    _check(tables='backend = "torch"')


def function_with_a_model() -> None:
    _check(tables='backend = "function"\nmodel = "models/judge"')


def reward_of_two_forms() -> None:
    _check(tables='function = "exact_match"\nmodel = "models/judge"')


def new_model_as_a_reward() -> None:
    _check(tables='model = { characters = "act>" }')


def no_override() -> None:
    _check("", "", "steps")


def wrong_override() -> None:
    _check("", "", "sampling.top_p=most")


def override_below_a_value() -> None:
    _check("", "", "task.source.name=words.jsonl")


def not_toml() -> None:
    _check("steps = ")


def missing_file() -> None:
    Path("mine.toml").touch()
    _meshrl("check", "mien.toml")


def unknown_configuration() -> None:
    _meshrl("check", "grpo/quikstart")


def no_algorithm() -> None:
    Path("mine.toml").write_text(TABLES, "utf-8")
    _meshrl("check", "mine.toml")


def unknown_algorithm() -> None:
    _check(algorithm="grppo")


def missing_script() -> None:
    _check(algorithm="mine.py")


def script_without_its_function() -> None:
    _script("async def main(run, config): ...")


def script_without_a_config() -> None:
    _script("async def mine(run, config): ...")


def script_that_raises() -> None:
    _script("import numpyy")


def new_over_own_work() -> None:
    Path("grpo.py").touch()
    _meshrl("new", "grpo", ".")


def mesh_of_no_role() -> None:
    _check(tables="[run.meshes.mian]\nranks = 2")


def axes_of_a_role() -> None:
    _check("", "[run.meshes.main]\nranks = 4", "reference.axes={dp=2, tp=3}")


def axes_without_a_size() -> None:
    _check("", "[run.meshes.main]\nranks = 4", "reference.axes={dp=4, tp=0}")


def axes_that_do_not_multiply() -> None:
    _check(tables="[run.meshes.main]\nranks = 4\naxes = { dp = 2, tp = 3 }")


def _distill(teacher: str) -> None:
    words = '[task]\nsource = "words.jsonl"\nheld_out = 0\n[policy]\nmodel = { characters = "act>" }\n'
    Path("words.jsonl").write_text(WORDS, "utf-8")
    Path("mine.toml").write_text(f'algorithm = "distill"\n{words}[teacher]\nmodel = {teacher}\n', "utf-8")
    _meshrl("check", "mine.toml")


def teacher_with_other_tokens() -> None:
    _distill('{ characters = "cat>" }')


def teacher_that_is_the_policy() -> None:
    _distill('{ characters = "act>" }')


def eval_without_prompts() -> None:
    run = Path("runs/mine")
    run.mkdir(parents=True)
    Path("words.jsonl").write_text(WORDS, "utf-8")
    (run / "config.toml").write_text(TABLES, "utf-8")
    (run / "metrics.jsonl").touch()
    _meshrl("eval", "mine")
