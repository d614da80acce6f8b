"""The wheel in an environment that has what the core needs and nothing else, outside the repository."""

import json
import re
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, Meshrl

FAKES = ("policy.backend=fake", "sampler.backend=fake", "reward.backend=fake")

pytestmark = pytest.mark.process

OF_EXTRAS = (
    "meshrl.agents.",
    "meshrl.engines.ray",
    "meshrl.testing.conformance",
    "meshrl.trackers.otlp",
    "meshrl.watch.",
)
"""Modules that an extra is needed for. `meshrl.agents` itself loads them when they are asked for."""

IMPORT_ALL = f"""
import importlib, pkgutil, sys
import meshrl.errors

def walk(path, prefix):
    for module in pkgutil.iter_modules(path, prefix):
        if module.name.startswith({OF_EXTRAS!r}) or module.name.endswith("__main__"):
            continue
        found = importlib.import_module(module.name)
        if module.ispkg:
            walk(found.__path__, module.name + ".")

walk(meshrl.__path__, "meshrl.")
for name in meshrl.__all__:
    try:
        getattr(meshrl, name)
    except meshrl.errors.BackendError as error:
        assert "pip install 'meshrl[agents]'" in str(error), error
print(sum(name.startswith("meshrl.") for name in sys.modules))
"""


def test_a_run_on_fakes_needs_no_extra_and_no_file(meshrl: Meshrl, tmp_path: Path) -> None:
    done = meshrl("run", "grpo/quickstart", *FAKES, "steps=12", "policy.optimizer.total_steps=12")
    assert done.returncode == 0, done.stderr
    assert re.search(r"exact_match_after +1\b", done.stdout)
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").is_file()
    report = meshrl("report", "quickstart")
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "runs" / "quickstart" / "report.html").read_text("utf-8")
    assert (ROOT / "meshrl" / "report" / "style.css").read_text("utf-8").splitlines()[-2] in page


def test_new_writes_what_check_finds_right_and_run_runs(meshrl: Meshrl, tmp_path: Path) -> None:
    assert meshrl("new", "grpo", "mine").returncode == 0
    checked = meshrl("check", "mine/config.toml", *FAKES)
    assert checked.returncode == 0, checked.stderr
    assert "no mistakes found" in checked.stdout
    done = meshrl("run", "mine/config.toml", *FAKES, "steps=2", "policy.optimizer.total_steps=2")
    assert done.returncode == 0, done.stderr
    assert [json.loads(file.read_text("utf-8")) for file in tmp_path.glob("runs/*/summary.json")]


def test_the_command_line_finds_the_shipped_configurations(meshrl: Meshrl) -> None:
    told = meshrl("configs").stdout
    for path in (ROOT / "configs").rglob("*.toml"):
        assert path.relative_to(ROOT / "configs").with_suffix("").as_posix() in told


def test_each_module_and_public_name_is_there_without_an_extra_or_names_it(meshrl: Meshrl) -> None:
    done = meshrl("-c", IMPORT_ALL, program="python")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["grpo/quickstart"], "torch"),
        (["grpo/quickstart", "policy.backend=fsdp"], "fsdp"),
        (["grpo/quickstart", "policy.backend=megatron"], "megatron"),
        (["grpo/quickstart", "sampler.backend=http"], "http"),
        (["grpo/quickstart", "sampler.backend=sglang"], "sglang"),
        (["grpo/quickstart", "sampler.backend=vllm"], "vllm"),
        (["grpo/quickstart", *FAKES, "run.engine=ray"], "ray"),
        (["grpo/quickstart", *FAKES, "run.log=mlflow"], "mlflow"),
        (["grpo/quickstart", *FAKES, "run.log=trackio"], "trackio"),
        (["grpo/quickstart", *FAKES, "run.otlp=http://127.0.0.1:4318"], "otlp"),
        (["grpo/quickstart", *FAKES, "run.log=wandb"], "wandb"),
        (["grpo/quickstart", *FAKES, "task.source=verifiers:gsm8k"], "verifiers"),
        (["grpo/smollm2", *FAKES], "tasks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_an_extra_says_what_to_type(meshrl: Meshrl, arguments: list[str], extra: str) -> None:
    done = meshrl("run", *arguments)
    assert done.returncode == 1
    assert f"pip install 'meshrl[{extra}]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "extra"),
    [("from meshrl.agents import Gateway", "agents"), ("import meshrl.testing.conformance", "torch")],
)
def test_modules_without_their_extra_say_what_to_type(meshrl: Meshrl, script: str, extra: str) -> None:
    done = meshrl("-c", script, program="python")
    assert re.search(rf"BackendError: .*pip install 'meshrl\[{extra}\]'", done.stderr), done.stderr
