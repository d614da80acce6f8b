"""Each extra alone, in an environment that has what it and the core need and nothing else: what it is for works."""

from pathlib import Path

import pytest

from tests.first_hour.terminal import FAKES, SMALL
from tests.packaging.conftest import install, run_in
from tests.packaging.test_contents import EXTRAS

pytestmark = [pytest.mark.process, pytest.mark.slow]

RUN = ("run", "grpo/quickstart", *SMALL, "steps=1", "prompts=2", "evaluation=false", "policy.optimizer.total_steps=1")
MODEL = (
    "policy.model={characters='abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>', hidden_size=8, ffn_size=8, "
    "layers=1, heads=1, max_tokens=32}"
)
USES = {
    "agents": ("python", "-c", "from meshrl.agents import Gateway; import meshrl.agents.recording"),
    "fsdp": (*RUN, MODEL, "policy.backend=fsdp"),
    "http": ("python", "-c", "import meshrl_http.sampler"),
    "megatron": (*RUN, MODEL, "policy.backend=megatron", "sampler.backend=torch"),
    "mlflow": (*RUN, *FAKES, "run.log=mlflow"),
    "otlp": (*RUN, *FAKES, "run.otlp=http://127.0.0.1:9"),
    "ray": (*RUN, *FAKES, "run.engine=ray"),
    "tasks": (*RUN, *FAKES, "task.source=reasoning_gym:spell_backward", "task.prompt={question}"),
    "torch": (*RUN, MODEL),
    "trackio": (*RUN, *FAKES, "run.log=trackio"),
    "wandb": (*RUN, *FAKES, "run.log=wandb"),
    "watch": ("python", "-c", "from meshrl.observe import Watcher; Watcher"),
}
NIGHTLY = USES.keys() - {"torch"}
"""What `make test` leaves to `make test-all`."""
ELSEWHERE = {"all", "dev", "docs", "gpu", "sglang", "verifiers", "vllm"}
"""Extras that are several of the others, for contributors, or whose packages this environment lacks."""


def test_each_extra_is_here_or_elsewhere() -> None:
    assert USES.keys() | ELSEWHERE == EXTRAS.keys()


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
