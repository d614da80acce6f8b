import asyncio
import itertools
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from meshrl import Batch, CrossEntropy, LocalEngine, Mesh, Ragged, Resources, log, testing
from meshrl.errors import ConfigError, ContractError, DataError, RankFailed
from meshrl.events import Call, Event, Gauge, Span
from meshrl.roles import PolicyConfig, SamplerConfig, Sampling

POLICY = PolicyConfig(model="none")
SAMPLER = SamplerConfig(model="none")


def rows(count: int, group: int = 0) -> Batch:
    return Batch.of(
        prompt=["?"] * count,
        answer=["ab"] * count,
        tokens=Ragged.of([[1, 2, 3]] * count, np.int32),
        loss_mask=Ragged.of([[True] * 3] * count, np.bool_),
        groups=np.full(count, group),
        oldest_version=np.zeros(count, np.int32),
    )


def test_a_call_takes_its_time_by_call_by_row_by_token_or_by_value() -> None:
    async def call(policy: type[testing.FakePolicy]) -> float:
        await policy(POLICY).update(rows(4), CrossEntropy())
        return asyncio.get_running_loop().time()

    policies = [
        testing.delayed(testing.FakePolicy, update=latency)
        for latency in (2.0, testing.per_row(2.0), testing.per_token(0.5))
    ]
    assert [testing.simulate(partial(call, policy)) for policy in policies] == [2.0, 8.0, 6.0]

    async def stream() -> list[float]:
        engine = LocalEngine()
        mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
        sampler = await mesh.spawn(testing.delayed(testing.FakeSampler, generate=testing.Lognormal(1, 0.5)), SAMPLER)
        loop = asyncio.get_running_loop()
        times = [loop.time() async for _ in sampler.generate(rows(4), Sampling())]
        await engine.close()
        return times

    times = testing.simulate(stream)
    assert times == testing.simulate(stream)
    assert len(set(times)) == 4
    assert times[0] > 0


def test_lognormal_and_recorded_latencies_have_the_mean_they_say(tmp_path: Path) -> None:
    random = Random(1)
    drawn = [testing.Lognormal(3, 0.8).draw(random, None) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(3, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.8, rel=0.05)

    spans = [Span(0, "main", 0, "FakePolicy", "update", *times) for times in ((1.5, 4), (5, 6))]
    noted: list[Event] = [Call(0, "FakePolicy", "update", 1, 9), Gauge("ready", 1, 2), *spans]
    events = tmp_path / "events.jsonl"
    events.write_bytes(msgspec.json.Encoder().encode_lines(noted))
    recorded = testing.Recorded.of(events, "FakePolicy.update")
    assert {recorded.draw(random, None) for _ in range(50)} == {2.5, 1}
    with pytest.raises(DataError, match=r"no call of Policy\.update; it has calls of FakePolicy\.update"):
        testing.Recorded.of(events, "Policy.update")


def test_a_role_crashes_where_it_was_told_to() -> None:
    async def calls() -> list[int]:
        engine = LocalEngine()
        mesh = await Mesh.reserve(engine, 1, Resources(cpus=0))
        policy = await mesh.spawn(testing.crashing(testing.FakePolicy, update=[2, 4]), POLICY)
        failed = []
        for number in range(1, 6):
            try:
                await policy.update(rows(1), CrossEntropy())
            except RankFailed:
                failed.append(number)
        await engine.close()
        return failed

    async def values() -> None:
        stream = testing.crashing(testing.FakeSampler, generate=[3])(SAMPLER).generate(rows(4), Sampling())
        await anext(stream)
        await anext(stream)
        with pytest.raises(testing.Crash, match=r"FakeSampler.generate was told to crash at its value 3"):
            await anext(stream)

    def fails(seed: int) -> bool:
        policy = testing.crashing(testing.FakePolicy, seed=seed, update=0.3)(POLICY)
        try:
            testing.simulate(partial(policy.update, rows(1), CrossEntropy()))
        except testing.Crash:
            return True
        return False

    assert testing.simulate(calls) == [2, 4]
    testing.simulate(values)
    assert 60 < sum(map(fails, range(300))) < 120
    with pytest.raises(ContractError, match=r"FakePolicy has no endpoint 'updat': did you mean 'update'\?"):
        testing.crashing(testing.FakePolicy, updat=[1])


async def lost_update(seed: int) -> None:
    """Two workers read, wait for some time and write: an update is lost where one reads before the other writes."""
    random = Random(seed)
    total = 0

    async def add() -> None:
        nonlocal total
        await asyncio.sleep(random.expovariate(1))
        seen = total
        await asyncio.sleep(random.expovariate(20))
        total = seen + 1

    await asyncio.gather(add(), add())
    assert total == 2, "an update was lost"


@pytest.mark.process
def test_the_lowest_seed_that_fails_is_found_and_one_command_replays_it() -> None:
    with pytest.raises(testing.ScheduleFailed) as alone:
        testing.explore(lost_update, seeds=1000)
    with pytest.raises(testing.ScheduleFailed) as together:
        testing.explore(lost_update, seeds=1000, workers=2)
    assert alone.value.seed == together.value.seed
    text = str(alone.value)
    assert text == str(together.value)
    assert text.startswith(f"lost_update fails under seed {alone.value.seed}: AssertionError: an update was lost")
    command = text.rpartition("To replay it: ")[2]
    assert f"test_explorer.py:lost_update --seed {alone.value.seed}" in command
    replayed = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True, check=False)
    assert replayed.returncode == 1
    assert "an update was lost" in replayed.stderr
    testing.explore(lost_update, seeds=alone.value.seed)


def test_an_exploration_says_how_many_seeds_hold_and_leaves_logging_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def says(_: int) -> None:
        log.warning("said")

    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, 10.0).__next__)  # each seed takes a while
    testing.explore(says, seeds=60)
    log.warning("said again")
    out, err = capsys.readouterr()
    assert "59 of 60 seeds hold left=10s" in err
    assert "60 of 60 seeds hold left=0s" in err
    assert (out, err.count("said")) == ("", 1)


def test_a_failure_that_depends_on_more_than_the_seed_is_told_and_a_scenario_in_a_function_has_one_process() -> None:
    async def flaky(seed: int) -> None:
        tried.append(seed)
        assert tried.count(2) != 1

    async def fails_at_three(seed: int) -> None:
        assert seed != 3

    tried: list[int] = []
    with pytest.raises(testing.ScheduleFailed, match="failed under seed 2, but not when it was replayed"):
        testing.explore(flaky, seeds=5)
    with pytest.raises(testing.ScheduleFailed, match=r"explore\(.*fails_at_three, seeds=1, first=3, time_limit=10\)"):
        testing.explore(fails_at_three, seeds=10, time_limit=10)
    with pytest.raises(ConfigError, match="cannot be loaded in another process"):
        testing.explore(fails_at_three, workers=2)


@pytest.mark.process
def test_a_script_that_its_processes_would_run_again_is_told_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from meshrl.testing import explore\nasync def scenario(seed): ...\nexplore(scenario, seeds=2, workers=2)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    last = ran.stderr[ran.stderr.rindex("ConfigError: a process that explores") :]
    assert 'call `explore` below `if __name__ == "__main__":`' in last
    assert f"python -m meshrl.testing {script}:scenario --workers 2" in last


def test_a_witness_tells_what_was_broken() -> None:
    async def trains(trained: list[tuple[int, int]], *, publishes_first: bool = True) -> None:
        witness = testing.Witness(testing.FakePolicy(POLICY))
        list(witness.prompts(iter([rows(1, group=0), rows(1, group=1)])))
        if publishes_first:
            await witness.weights()
        for group, count in trained:
            await witness.update(rows(count, group), CrossEntropy())
            await witness.weights()
        witness.check(ahead=1, n=2)

    testing.simulate(partial(trains, [(0, 2), (1, 2)]))
    for trained, broken in (
        ([(0, 2), (0, 2)], "more than one step"),
        ([(0, 1), (1, 2)], "2 rows"),
        ([(0, 2)], "1 prompts that were drawn were never trained, and 0 groups"),
        ([(0, 2), (1, 2), (2, 2)], "2 rows were more than ahead=1 publications behind.*trains rows again"),
    ):
        with pytest.raises(testing.PromiseBroken, match=broken):
            testing.simulate(partial(trains, trained))
    told = r"2 rows were trained before any weights were published: .*publish\("
    with pytest.raises(testing.PromiseBroken, match=told):
        testing.simulate(partial(trains, [(0, 2)], publishes_first=False))
