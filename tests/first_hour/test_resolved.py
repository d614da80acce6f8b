"""What a run recorded of its configuration is one that it reads back to."""

from pathlib import Path

import pytest

from meshrl.run import RunConfig, find_config, load_job, shipped_configs
from meshrl.run.recorder import Recorder

SEVERAL = "reward={functions = {right = 'numeric_answer', form = 'reasoning_format'}, weights = {form = 0.1}}"
MORE = {
    "several rewards": ["grpo/quickstart", SEVERAL],
    "several rewards in a list": ["grpo/quickstart", "reward={functions = ['exact_match', 'numeric_answer']}"],
    "a model that judges": ["grpo/quickstart", "reward={backend = 'torch', model = 'models/judge'}"],
    "adapters": ["grpo/quickstart", "policy.lora={rank = 4, sync = 'adapters'}", "policy.dtype=bfloat16"],
    "a backend of its own options": ["grpo/quickstart", "policy.backend=fsdp", "policy.fsdp.replicate=2"],
    "an evaluation": ["grpo/quickstart", "evaluation={every = 5, temperature = 0.5}", "run.log=['tensorboard']"],
    "a chat": ["ppo/quickstart", "policy.chat=true", "policy.chat_template_kwargs={enable_thinking = false}"],
    "meshes": ["grpo/quickstart", "sampler.mesh=other", "run.meshes={other = {ranks = 2, axes = {dp = 2}}}"],
}


@pytest.mark.parametrize(
    "given", [*([name] for name in shipped_configs()), *MORE.values()], ids=[*shipped_configs(), *MORE]
)
def test_it_reads_back(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *overrides = given
    job = load_job(find_config(name), overrides, RunConfig)
    with Recorder(tmp_path / "run", job.resolved):
        pass
    again = load_job(tmp_path / "run" / "config.toml", [], RunConfig)
    absolute = job.run.model_copy(update={"folder": str(tmp_path / "runs")})
    assert (again.config.model_dump(), again.run) == (job.config.model_dump(), absolute)
    assert again.resolved == job.resolved
