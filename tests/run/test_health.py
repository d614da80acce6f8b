import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from meshrl import Batch, Metrics, Ragged, Run, RunConfig
from meshrl.errors import ConfigError
from meshrl.events import Call, Event, Gauge, Span, Wait, sink
from meshrl.observe.run_files import EVENT
from meshrl.roles import Flops, ModelConfig
from meshrl.run import health
from meshrl.run.health import Health, MeshShape, core_peak
from meshrl.run.prometheus import exposition


def called(number: int, mesh: str, endpoint: str, tokens: int | None, rows: int = 4) -> list[Event]:
    actor = "Sampler" if endpoint == "generate" else "Policy"
    return [
        Span(number, mesh, 0, actor, endpoint, 0, 1),
        Call(number, actor, endpoint, 0, 1, rows=rows, tokens=tokens),
    ]


async def test_speeds_utilisation_and_waits_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Health()
    monkeypatch.setattr(health, "flops_of", lambda _: Flops(per_token=100.0, per_pair=2.0))
    monkeypatch.setattr(health, "core_peak", lambda: 1e4)
    config = ModelConfig(backend="fake", model="none")
    await found.learn("Policy", config, MeshShape("main", 2, 0.0))
    found.see(called(1, "rollout", "generate", None))
    found.see(called(2, "main", "update", 400) + called(3, "main", "logprobs", 400))
    found.see([Wait("trainer", "a batch", "", 0.5, 1.5), Wait("trainer", "a batch", "", 2, 2.5)])
    told = found.gauges(4.0, drawn=120, rows=4, known={"cores of main": 3.0})
    pairs = 4 * 100 * 101 / 2  # four rows of 100 tokens, each of which sees those before it and itself
    operations = (3 + 1) * (100.0 * 400 + 2.0 * pairs)
    assert told == pytest.approx(
        {
            "tokens a second of main": 200.0,
            "tokens a second of rollout": 30.0,
            "FLOPs utilisation of main": operations / 4 / (1e4 * 3 * 2),
            "time waited of trainer": 1.5 / 4,
        }
    )
    found.see(called(4, "main", "update", 400))
    told = found.gauges(6.0, drawn=None, rows=0, known={"cores of main": 3.0})
    assert told["tokens a second of main"] == 200.0
    assert "tokens a second of rollout" not in told, "it is unknown, and not zero"


async def test_models_of_one_class_need_their_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Health()
    needed = {"large": 100.0, "small": 10.0}
    monkeypatch.setattr(health, "flops_of", lambda config: Flops(per_token=needed[config.model], per_pair=0.0))
    monkeypatch.setattr(health, "core_peak", lambda: 1e4)
    large, small = (ModelConfig(backend="fake", model=model) for model in needed)
    await found.learn("Reference", large, MeshShape("one", 1, 0.0))
    await found.learn("Reference", small, MeshShape("two", 1, 0.0))
    for config in (large, small):
        await found.learn("Reference", config, MeshShape("both", 1, 0.0))
    for number, mesh in enumerate(("one", "two", "both")):
        call = Call(number, "Reference", "logprobs", 0, 1, rows=1, tokens=400)
        found.see([Span(number, mesh, 0, "Reference", "logprobs", 0, 1), call])
    told = found.gauges(4.0, 0, 0, {f"cores of {mesh}": 1.0 for mesh in ("one", "two", "both")})
    used = {name: value for name, value in told.items() if name.startswith(health.USE)}
    assert used == pytest.approx({"FLOPs utilisation of one": 1.0, "FLOPs utilisation of two": 0.1})


def test_the_speed_of_cores_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(health, "_MEASURE", "print(8e9)")
    monkeypatch.setattr(health, "free_cores", lambda: 4)
    assert core_peak() == 2e9
    monkeypatch.setattr(health, "_MEASURE", "raise SystemExit(1)")
    assert core_peak() == 2e9
    file = tmp_path / ".cache" / "meshrl" / "matmul.json"
    monkeypatch.setattr(health, "free_cores", lambda: 2)
    monkeypatch.setattr(health, "_MEASURE", "print(8e9)")
    assert core_peak() == 4e9
    assert sorted(msgspec.json.decode(file.read_bytes(), type=dict[str, float]).values()) == [2e9, 4e9], "both are kept"
    monkeypatch.setattr(health, "_MEASURE", "raise SystemExit(1)")
    (tmp_path / ".cache" / "meshrl" / "matmul.json").write_text("{", "utf-8")
    assert core_peak() is None, "it is unknown, and not zero"


def test_numbers_in_the_form_of_prometheus() -> None:
    numbers = {"reward": 0.5, "reward/right": float("nan"), "tokens a second of main": 2.0, "tokens a second of b": 3.0}
    assert exposition('a "run"', numbers) == (
        "# HELP meshrl_reward Reward of the step's completions. Unit: mean over completions.\n"
        "# TYPE meshrl_reward gauge\n"
        'meshrl_reward{run="a \\"run\\""} 0.5\n'
        "# HELP meshrl_reward_right Reward of one of several reward functions, by its name, before weighting. Unit: "
        "mean over completions.\n"
        "# TYPE meshrl_reward_right gauge\n"
        'meshrl_reward_right{run="a \\"run\\""} nan\n'
        "# HELP meshrl_tokens_a_second Tokens that the calls of a mesh read or drew since the step before. A batch "
        "that two calls read counts twice. Unit: tokens a second.\n"
        "# TYPE meshrl_tokens_a_second gauge\n"
        'meshrl_tokens_a_second{run="a \\"run\\"",of="main"} 2.0\n'
        'meshrl_tokens_a_second{run="a \\"run\\"",of="b"} 3.0\n'
    )


def fetched(address: str, host: str | None = None) -> str:
    asked = urllib.request.Request(address, headers={"Host": host} if host else {})  # noqa: S310 -- of this machine
    with urllib.request.urlopen(asked) as answer:  # noqa: S310 -- of this machine
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


async def test_a_run_serves_its_newest_numbers_while_it_runs(tmp_path: Path) -> None:
    batch = Batch.of(tokens=Ragged.of([[1, 2], [3]], np.int32), rewards=np.array([0.25, 0.75], np.float32))
    text = ""
    with capture_logs() as logs:
        async with Run(RunConfig(folder=str(tmp_path), metrics_port=0)) as run:
            (address,) = [word for each in logs for word in each["event"].split() if word.endswith("/metrics")]
            async for _ in run.steps(1):
                events = sink.get()
                assert events is not None
                for event in called(1, "main", "update", 3):
                    events.emit(event)
                await run.record(Metrics.of(loss=(2.0, 4.0)), batch)
                text = fetched(address)
                port = int(address.rpartition(":")[2].partition("/")[0])
                assert "meshrl_loss" in fetched(address, host="localhost:9999"), "the port may be forwarded"
                with pytest.raises(HTTPError, match="421"):
                    fetched(address, host=f"elsewhere.example:{port}")
                with pytest.raises(ConfigError, match=f"run.metrics_port = {port}: .*: choose another port"):
                    async with Run(RunConfig(folder=str(tmp_path), name="other", metrics_port=port)):
                        pass
        with pytest.raises(OSError, match="refused"):
            fetched(address)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert {name: float(lines[f'meshrl_{name}{{run="run"}}']) for name in ("step", "loss", "reward", "tokens")} == {
        "step": 0,
        "loss": 0.5,
        "reward": 0.5,
        "tokens": 3,
    }
    assert float(lines['meshrl_memory{run="run"}']) > 1 << 20
    gauges = [
        event
        for line in (run.folder / "events.jsonl").read_bytes().splitlines()
        if isinstance(event := EVENT.decode(line), Gauge)
    ]
    (speed,) = [event for event in gauges if event.name == "tokens a second of main"]
    assert speed.value > 3 / speed.at, "the time before the first step does not count"
    assert f"{speed.value!r}" == lines['meshrl_tokens_a_second{run="run",of="main"}']
    assert msgspec.json.decode((run.folder / "summary.json").read_bytes())["status"] == "finished"
