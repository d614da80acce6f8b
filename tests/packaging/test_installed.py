"""The wheel in environments that have what the core needs, and one extra or none: outside the repository."""

import json
import re
from pathlib import Path

import pytest

from tests.first_hour.terminal import FAKES, SMALL
from tests.packaging.conftest import ROOT, Meshrl, install, run_in
from tests.packaging.test_contents import EXTRAS

pytestmark = pytest.mark.process

NAMES = (
    "agents.",
    "engines.ray",
    "http_server",
    "testing.conformance",
    "run.trackers.otlp",
    "observe.server",
    "tinker.",
)
"""Modules that an extra is needed for. `meshrl.agents` and `meshrl.tinker` load them when they are asked for."""
IMPORT_ALL = f"""
import importlib, pkgutil, sys
import meshrl.errors

for module in pkgutil.walk_packages(meshrl.__path__, "meshrl.", onerror=lambda name: None):
    if not module.name.removeprefix("meshrl.").startswith({NAMES!r}) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in meshrl.__all__:
    try:
        getattr(meshrl, name)
    except meshrl.errors.BackendError as error:
        assert "pip install 'meshrl[agents]'" in str(error), error
count = sum(name.startswith("meshrl.") for name in sys.modules)
"""


def test_what_new_writes_runs_on_fakes_without_an_extra_and_has_a_report(meshrl: Meshrl, tmp_path: Path) -> None:
    told = meshrl("configs").stdout
    for path in (ROOT / "configs").rglob("*.toml"):
        assert path.relative_to(ROOT / "configs").with_suffix("").as_posix() in told
    for command in (
        ("new", "grpo", "mine"),
        ("run", "mine/config.toml", *FAKES, "steps=12", "policy.optimizer.total_steps=12"),
        ("report", "runs/mine"),
    ):
        done = meshrl(*command)
        assert done.returncode == 0, done.stderr
        if command[0] == "run":
            assert re.search(r"reward_sampled_after +1\b", done.stdout)
    page = (tmp_path / "runs" / "mine" / "report.html").read_text("utf-8")
    assert (ROOT / "meshrl" / "observe" / "style.css").read_text("utf-8").splitlines()[-2] in page


NEEDS = (
    ((), "torch"),
    (("policy.backend=fsdp",), "fsdp"),
    (("policy.backend=megatron",), "megatron"),
    (("sampler.backend=http",), "http"),
    (("sampler.backend=sglang",), "sglang"),
    (("sampler.backend=vllm",), "vllm"),
    ((*FAKES, "run.engine=ray"), "ray"),
    ((*FAKES, "run.log=mlflow"), "mlflow"),
    ((*FAKES, "run.log=trackio"), "trackio"),
    ((*FAKES, "run.otlp=http://127.0.0.1:4318"), "otlp"),
    ((*FAKES, "run.log=wandb"), "wandb"),
    ((*FAKES, "task.source=reasoning_gym:spell_backward"), "tasks"),
)
RUN_ALL = f"""
import contextlib, io, json
from meshrl.cli import main

told = []
for arguments, extra in {NEEDS!r}:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(["run", "grpo/quickstart", *arguments])
        except SystemExit as ended:
            told.append([extra, ended.code, err.getvalue()])
for code, extra in (
    ("from meshrl.agents import Gateway", "agents"),
    ("from meshrl.tinker import serve", "tinker"),
    ("import meshrl.testing.conformance", "torch"),
):
    try:
        exec(code)
    except meshrl.errors.BackendError as error:
        told.append([extra, 1, str(error)])
print(count)
print(json.dumps(told))
"""


def test_each_module_is_there_without_an_extra_and_what_needs_one_says_what_to_type(meshrl: Meshrl) -> None:
    done = meshrl("-c", IMPORT_ALL + RUN_ALL, program="python")
    assert done.returncode == 0, done.stderr
    count, told = map(json.loads, done.stdout.splitlines()[-2:])
    assert count > 150
    assert [extra for extra, _, _ in told] == [*(extra for _, extra in NEEDS), "agents", "tinker", "torch"]
    for extra, status, err in told:
        assert (status, "Traceback" in err) == (1, False), err
        assert f"pip install 'meshrl[{extra}]'" in err, err


RUN = ("run", "grpo/quickstart", *SMALL, "steps=1", "prompts=2", "~evaluation", "policy.optimizer.total_steps=1")
MODEL = (
    "policy.model={characters='abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>', hidden_size=8, ffn_size=8, "
    "layers=1, heads=1, max_tokens=32}"
)
IMPORTS_MASKS = "from meshrl.data import Branch, Constraint; from meshrl_torch.model.masks import check_grammar"
USES = {
    "agents": ("python", "-c", "from meshrl.agents import Gateway; import meshrl.agents.recording"),
    "constraints": ("python", "-c", f"{IMPORTS_MASKS}; check_grammar(Constraint((Branch(regex='a'),)))"),
    "images": ("python", "-c", "from meshrl.tasks import images; from PIL import Image"),
    "fsdp": (*RUN, MODEL, "policy.backend=fsdp"),
    "http": ("python", "-c", "import meshrl_http.sampler"),
    "maths": ("python", "-c", "import meshrl as rl; assert rl.math_answer('', '$1/2$', {'answer': '0.5'}) == 1"),
    "megatron": (*RUN, MODEL, "policy.backend=megatron", "sampler.backend=torch"),
    "mlflow": (*RUN, *FAKES, "run.log=mlflow"),
    "otlp": (*RUN, *FAKES, "run.otlp=http://127.0.0.1:9"),
    "ray": (*RUN, *FAKES, "run.engine=ray"),
    "tasks": (*RUN, *FAKES, "task.source=reasoning_gym:spell_backward", "task.prompt={question}"),
    "tinker": ("python", "-c", "from meshrl.tinker import serve; serve"),
    "torch": (*RUN, MODEL),
    "trackio": (*RUN, *FAKES, "run.log=trackio"),
    "wandb": (*RUN, *FAKES, "run.log=wandb"),
    "watch": ("python", "-c", "from meshrl.observe import Watcher; Watcher"),
}
NIGHTLY = USES.keys() - {"torch"}
"""What `make test` leaves to `make test-all`."""
ELSEWHERE = {"all", "dev", "docs", "evals", "gpu", "mcp", "sglang", "vllm"}
"""Extras that are several of the others, for contributors, or whose packages this environment lacks."""


@pytest.mark.slow
def test_each_extra_is_here_or_elsewhere() -> None:
    assert USES.keys() | ELSEWHERE == EXTRAS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [pytest.param(extra, marks=[pytest.mark.wide] if extra in NIGHTLY else []) for extra in USES]
)
def test_an_extra_suffices_alone(extra: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    meshrl = run_in(install(wheel, tmp_path / "venv", extra), tmp_path)
    program, *arguments = USES[extra] if USES[extra][0] == "python" else ("meshrl", *USES[extra])
    done = meshrl(*arguments, program=program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "receives nothing more" not in done.stderr, done.stderr
