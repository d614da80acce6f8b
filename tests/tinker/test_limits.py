"""What one client can cost the others or the server: results that nobody fetches, silence, files, and odd values."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.tinker.served import client, datum, served, table
from tests.tinker.test_sdk import ADAM, PROMPT, ROW, post

KEYS = {name: f"tml-{name}" for name in ("one", "two", "small")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


def quotas() -> dict[str, dict[str, object]]:
    return {name: {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "models": 2} for name, key in KEYS.items()}


@pytest.fixture(scope="module")
def server(model: str, folder: Path) -> Iterator[str]:
    """It keeps results of 4 KB of each tenant."""
    small = {"storage_gib": 1e-4}
    with served(
        table(model, folder, tenants={**quotas(), "small": quotas()["small"] | small}, samples_mib=0.004)
    ) as url:
        yield url


def told(server: str, path: str, body: dict[str, Any], tenant: str) -> tuple[int, dict[str, Any]]:
    return post(server, path, json.dumps(body).encode(), X_API_Key=KEYS[tenant])


def test_results_that_nobody_fetches_leave_first_and_those_of_others_stay(server: str) -> None:
    asked = {
        "base_model": "tiny",
        "prompt": {"chunks": [{"tokens": [1, 5, 3]}]},
        "sampling_params": {"max_tokens": 40},
        "num_samples": 8,
    }
    names = {name: told(server, "asample", asked, name)[1]["request_id"] for name in ("one", "two")}
    more = [told(server, "asample", {**asked, "num_samples": 64}, "one")[1]["request_id"] for _ in range(3)]
    while told(server, "retrieve_future", {"request_id": more[-1]}, "one")[0] == 408:
        pass
    sampler = client(server, KEYS["one"]).create_sampling_client(base_model="tiny").result()
    assert len(sampler.sample(PROMPT, 64, types.SamplingParams(max_tokens=40)).result().sequences) == 64
    kept = {name: told(server, "retrieve_future", {"request_id": own}, name)[0] for name, own in names.items()}
    assert kept == {"one": 410, "two": 200}


def test_a_session_without_a_sign_gives_up_its_models_and_what_waits(model: str, tmp_path: Path) -> None:
    with served(table(model, tmp_path, tenants=quotas(), session_timeout=3)) as url:
        leaves(url)


def leaves(server: str) -> None:
    session = told(server, "create_session", {}, "one")[1]["session_id"]
    for number in range(2):
        made = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
        assert told(server, "create_model", made, "one")[0] == 200
    waiting = {"model_id": f"{session}:train:0", "seq_id": 5, "adam_params": {}}
    assert told(server, "optim_step", waiting, "one")[0] == 200
    service = client(server, KEYS["one"])
    training: tinker.TrainingClient | None = None
    while training is None:
        with suppress(tinker.APIStatusError):  # the most: unload one
            training = service.create_lora_training_client("tiny").result()
    training.forward([ROW], "cross_entropy").result()
    _, answer = told(server, "retrieve_future", {"request_id": f"{session}:train:0:5"}, "one")
    assert "removed" in answer["error"]
    again = {"model_id": f"{session}:train:0", "seq_id": 1, "adam_params": {}}
    assert told(server, "optim_step", again, "one")[0] == 200, "its client may come back"


def test_journals_count_as_storage_and_a_step_is_always_let_in(server: str) -> None:
    service = client(server, KEYS["small"])
    training = service.create_lora_training_client("tiny").result()
    row = datum([1, 5, 3, 8] * 10, weights=[1.0] * 39)
    training.forward_backward([row] * 200, "cross_entropy").result()
    tensors = {"target_tokens": {"data": [5], "dtype": "int64"}, "weights": {"data": [1], "dtype": "float32"}}
    row_of_json = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": tensors}
    passed = {"data": [row_of_json], "loss_fn": "cross_entropy"}
    more = {"model_id": training.model_id, "seq_id": 2, "forward_input": passed}
    status, answer = told(server, "forward", more, "small")
    assert (status, "the files of this key have" in answer["error"]) == (429, True)
    assert training.optim_step(ADAM).result().metrics


@pytest.mark.parametrize("value", [2**70, {"deep": [-(2**65)]}])
def test_metadata_that_no_file_can_hold_is_refused(server: str, value: object) -> None:
    status, answer = told(server, "create_session", {"user_metadata": {"number": value}}, "two")
    assert (status, answer["category"]) == (400, "user")
    client(server, KEYS["two"]).create_sampling_client(base_model="tiny").result()


def test_what_a_disk_says_does_not_tell_where_the_server_keeps_its_files(server: str, folder: Path) -> None:
    service = client(server, KEYS["two"])
    path = service.create_lora_training_client("tiny").result().save_weights_for_sampler("lost").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    for file in (folder / "state/two/models").glob("*/sampler_weights/lost/weights/*"):
        file.unlink()
    with pytest.raises(tinker.RequestFailedError) as caught:
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result()
    assert "FileNotFoundError: No such file or directory" in str(caught.value)
    assert str(folder) not in str(caught.value)
