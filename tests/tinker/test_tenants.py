"""Two tenants of a server: neither reads what the other has, nor keeps it waiting, nor gets more than its share."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from meshrl.errors import ConfigError
from tests.tinker.served import client, served, table
from tests.tinker.test_sdk import ADAM, PROMPT, ROW, post

KEYS = {"one": "tml-one", "two": "tml-two"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def tenants() -> dict[str, dict[str, Any]]:
    return {
        name: {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "models": 2, "requests": 24, "storage_gib": 1e-4}
        for name, key in KEYS.items()
    }


@pytest.fixture(scope="module")
def shared(model: str, folder: Path, tenants: dict[str, dict[str, Any]]) -> Iterator[str]:
    with served(table(model, folder / "shared", tenants=tenants)) as url:
        yield url


def test_a_key_that_nobody_has_is_refused(shared: str) -> None:
    with pytest.raises(tinker.AuthenticationError, match="no tenant"):
        tinker.RestClient(base_url=shared, api_key="tml-three").get_server_capabilities().result()


def test_what_one_has_the_other_cannot_read(shared: str) -> None:
    mine, other = client(shared, KEYS["one"]), client(shared, KEYS["two"])
    theirs = tinker.RestClient(base_url=shared, api_key=KEYS["two"])
    training = mine.create_lora_training_client("tiny").result()
    path = training.save_weights_for_sampler("mine").result().path
    state = training.save_state("mine").result().path
    tries: list[Callable[[], Any]] = [
        lambda: other.create_sampling_client(model_path=path).result(),
        lambda: other.create_training_client_from_state(state).result(),
        lambda: theirs.get_weights_info_by_tinker_path(state).result(),
        lambda: theirs.list_checkpoints(training.model_id).result(),
        lambda: theirs.get_training_run(training.model_id).result(),
        lambda: theirs.delete_checkpoint_from_tinker_path(state).result(),
        lambda: theirs.get_session(mine.holder.get_session_id()).result(),
    ]
    for attempt in tries:
        with pytest.raises(tinker.APIStatusError, match="there is no"):
            attempt()
    assert theirs.list_user_checkpoints().result().checkpoints == []
    assert theirs.list_training_runs().result().training_runs == []
    body = {"request_id": f"{training.model_id}:0"}
    answer = post(shared, "retrieve_future", json.dumps(body).encode(), X_API_Key=KEYS["two"])
    assert (answer[0], "there is no model" in answer[1]["error"]) == (404, True)
    late = {"model_id": training.model_id, "seq_id": 9, "adam_params": {}}
    assert post(shared, "optim_step", json.dumps(late).encode(), X_API_Key=KEYS["two"])[0] == 404
    rest = tinker.RestClient(base_url=shared, api_key=KEYS["one"])
    rest.publish_checkpoint_from_tinker_path(path).result()
    sampler = other.create_sampling_client(model_path=path).result()
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences
    saved = [training.save_state(f"more-{number}") for number in range(10)]
    with pytest.raises(tinker.RequestFailedError, match="the most: delete some"):
        saved[-1].result()
    mine.close("success").result()
    other.close("success").result()


def flood(shared: str) -> dict[str, str]:
    """Send requests of both, of which none can be applied before the last. The model of each."""
    clients = {name: client(shared, key) for name, key in KEYS.items()}
    models = {name: each.create_lora_training_client("tiny").result().model_id for name, each in clients.items()}

    def send(name: str, number: int, rows: int) -> int:
        tensors = {
            "target_tokens": {"data": [5, 3, 8], "dtype": "int64"},
            "weights": {"data": [1, 1, 1], "dtype": "float32"},
        }
        row = {"model_input": {"chunks": [{"tokens": [1, 5, 3]}]}, "loss_fn_inputs": tensors}
        passed = {"data": [row] * rows, "loss_fn": "cross_entropy"}
        body = {"model_id": models[name], "seq_id": number, "forward_input": passed}
        return post(shared, "forward", json.dumps(body).encode(), X_API_Key=KEYS[name])[0]

    assert [send("one", number, 64) for number in range(2, 20)] == [200] * 18
    assert [send("two", number, 8) for number in range(2, 10)] == [200] * 8
    assert [send("one", number, 1) for number in range(20, 27)] == [200] * 6 + [429]
    assert (send("one", 1, 64), send("two", 1, 8)) == (200, 200)  # the one that all wait for is let in
    for name, last in (("two", 9), ("one", 25)):
        waiting = {"request_id": f"{models[name]}:{last}"}
        assert post(shared, "retrieve_future", json.dumps(waiting).encode(), X_API_Key=KEYS[name])[0] == 200
    for each in clients.values():
        each.close("success").result()
    return models


def test_one_who_asks_for_much_does_not_keep_the_other_waiting(model: str, folder: Path, tenants: Any) -> None:
    roomy = {name: {**each, "storage_gib": 1} for name, each in tenants.items()}
    with served(table(model, folder / "fair", tenants=roomy)) as url:
        models = flood(url)
    lines = (folder / "fair/runs/tinker/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    order = [
        (each["tenant"], each["number"]) for each in events if each["kind"] == "request" and each["verb"] == "forward"
    ]
    assert len(order) == 34
    assert {each["model"] for each in events if each["kind"] == "request"} == {*models.values()}
    # All nine of the one who asks for little are served before the fourth of the other.
    assert {("two", number) for number in range(1, 10)} <= set(order[: order.index(("one", 4))])


def test_a_tenant_has_so_many_models(shared: str) -> None:
    service = client(shared, KEYS["two"])
    training = service.create_lora_training_client("tiny").result()
    service.create_lora_training_client("tiny").result()
    with pytest.raises(tinker.APIStatusError, match="the most: unload one"):
        service.create_lora_training_client("tiny").result()
    training.forward_backward([ROW], "cross_entropy").result()
    training.optim_step(ADAM).result()
    service.close("success").result()
    client(shared, KEYS["two"]).create_lora_training_client("tiny").result()


def test_without_tenants_no_one_else_may_reach_the_server(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add a tenant"), served(table(model, tmp_path, host="0.0.0.0")):  # noqa: S104
        pass
