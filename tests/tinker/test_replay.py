"""Sessions afterwards: their requests give the same bits again, and an audit and a report know them."""

import json
from pathlib import Path

import pytest

from meshrl.errors import DataError
from meshrl.observe import read_run, run_lines
from meshrl.tinker import ServedConfig, replay
from tests.algorithms.pages import meshrl
from tests.tinker.served import client, datum, served
from tests.tinker.test_adapters import ADAM, adapted, row


def session(url: str) -> None:
    """Two models with steps, and one more from a state of each."""
    service = client(url)
    models = [service.create_lora_training_client("tiny", rank=2 + number, seed=number).result() for number in range(2)]
    for number, training in enumerate(models):
        for step in range(3):
            passed = training.forward_backward([row(number), row(step)], "cross_entropy")
            stepped = training.optim_step(ADAM)
            passed.result()
            stepped.result()
        path = training.save_state("kept").result().path
        training.forward_backward([row(9)], "cross_entropy").result()
        training.optim_step(ADAM).result()
        again = service.create_training_client_from_state_with_optimizer(path).result()
        again.forward([datum([1, 5, 3], weights=[1.0] * 2)], "cross_entropy").result()
    service.close("success").result()


async def test_a_recorded_session_gives_the_same_bits_again(model: str, tmp_path: Path) -> None:
    config = adapted(model, tmp_path, record=True, state_every=1)
    with served(config) as url:
        session(url)
    found = await replay(ServedConfig.model_validate(config))
    assert [(each.compared, list(each.differences)) for each in found] == [(8, []), (8, []), (2, []), (2, [])]
    config["policy"]["lora"]["alpha"] = 16
    other = await replay(ServedConfig.model_validate(config))
    assert all("has another result" in each.differences[-1] for each in other if each.compared > 2)


async def test_a_journal_without_its_beginning_is_told_and_the_audit_knows_the_session(
    model: str, tmp_path: Path
) -> None:
    config = adapted(model, tmp_path, state_every=1)
    with served(config) as url:
        session(url)
    with pytest.raises(DataError, match=r"begins with request \d+: .* Set tinker\.record = true"):
        await replay(ServedConfig.model_validate(config))

    folder = tmp_path / "runs/tinker"
    told = dict(run_lines(read_run(folder)))
    assert told["requests"] == "24 of 4 models and 1 tenants, 0 failed"
    assert "optim_step: 8" in told["of them"]
    assert meshrl("audit", str(folder)) == 0
    events = folder / "events.jsonl"
    lines = events.read_text("utf-8").splitlines()
    passes = [line for line in lines if json.loads(line).get("verb") == "forward_backward"]
    events.write_text("".join(f"{line}\n" for line in [*lines, passes[0]]), "utf-8")
    assert meshrl("audit", str(folder)) == 1
