"""The SDK's clients on our server: what each public method does, in sync and async, and what is refused."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.tinker.served import KEY, client, datum, served, table

ROW = datum([1, 5, 3, 8], weights=[1.0, 1.0, 1.0])
PROMPT = types.ModelInput.from_ints([1, 5, 3])
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def service(url: str) -> tinker.ServiceClient:
    return client(url)


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", user_metadata={"mine": "yes"}).result()


def loss(training: tinker.TrainingClient) -> float:
    return training.forward([ROW], "cross_entropy").result().metrics["loss:sum"]


def step(training: tinker.TrainingClient) -> dict[str, float]:
    passed = training.forward_backward([ROW], "cross_entropy")
    stepped = training.optim_step(ADAM)
    passed.result()
    return stepped.result().metrics or {}


def post(url: str, path: str, body: bytes, kind: str = "application/json", **headers: str) -> tuple[int, Any]:
    """A request as another program would send it. The status and the JSON of the answer."""
    named = {"X-API-Key": KEY, "Content-Type": kind, **{name.replace("_", "-"): each for name, each in headers.items()}}
    request = urllib.request.Request(f"{url}/api/v1/{path}", body, named)  # noqa: S310 -- loopback
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_step_is_torchs_adamw(training: tinker.TrainingClient, model: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(model)
    adamw = torch.optim.AdamW(network.parameters(), lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    values = types.AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, grad_clip_norm=0.5)
    for _ in range(2):
        logits = network(torch.tensor([[1, 5, 3]])).logits[0]
        torch.nn.functional.cross_entropy(logits, torch.tensor([5, 3, 8]), reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        training.forward_backward([ROW], "cross_entropy").result()
        training.optim_step(values).result()
    right = network(torch.tensor([[1, 5, 3]])).logits[0].log_softmax(-1)[[0, 1, 2], [5, 3, 8]]
    found = training.forward([ROW], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found, right.detach().numpy(), atol=2e-5)


def test_samples_follow_the_weights_that_were_saved(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    base = service.create_sampling_client(base_model="tiny").result()
    before = training.forward([ROW], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    step(training)
    path = training.save_weights_for_sampler("after").result().path
    named = service.create_sampling_client(model_path=path).result()
    step(training)
    newest = training.save_weights_and_get_sampling_client().result()
    after = training.forward([ROW], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    whole = types.ModelInput.from_ints([1, 5, 3, 8])
    values = {
        name: each.compute_logprobs(whole).result()
        for name, each in (("base", base), ("named", named), ("new", newest))
    }
    np.testing.assert_allclose(np.array(values["base"][1:], float), before, atol=1e-5)
    np.testing.assert_allclose(np.array(values["new"][1:], float), after, atol=1e-5)
    assert values["base"][0] is None
    assert values["named"] not in (values["base"], values["new"])


def test_a_sample_tells_log_probs_and_the_most_probable_tokens(service: tinker.ServiceClient, model: str) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    limits = types.SamplingParams(max_tokens=6, seed=3, stop=[4])
    wanted = types.TensorData(data=[2, -1, 7, 1], dtype="int64", shape=[2, 2])
    drawn = sampler.sample(
        PROMPT, 3, limits, include_prompt_logprobs=True, topk_prompt_logprobs=4, topk_sample_logprobs=2,
        target_prompt_logprobs=wanted,
    ).result()  # fmt: skip
    network = AutoModelForCausalLM.from_pretrained(model)
    logits = network(torch.tensor([[1, 5, 3]])).logits[0].log_softmax(-1).detach()
    assert drawn.prompt_logprobs is not None
    assert drawn.topk_prompt_logprobs is not None
    np.testing.assert_allclose(np.array(drawn.prompt_logprobs[1:], float), logits[[0, 1], [5, 3]].numpy(), atol=1e-5)
    assert drawn.topk_prompt_logprobs[0] is None
    best = logits[1].topk(4)
    assert [token for token, _ in drawn.topk_prompt_logprobs[2] or []] == best.indices.tolist()
    assert drawn.target_prompt_logprobs is not None
    told = drawn.target_prompt_logprobs.to_numpy().reshape(2, 2)
    np.testing.assert_allclose([told[0, 0], *told[1]], logits[[0, 1, 1], [2, 7, 1]].numpy(), atol=1e-5)
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3
    for sequence in drawn.sequences:
        ids = torch.tensor([[1, 5, 3, *sequence.tokens]])
        right = network(ids).logits[0].log_softmax(-1).detach()
        own = [float(right[2 + place, token]) for place, token in enumerate(sequence.tokens)]
        np.testing.assert_allclose(np.array(sequence.logprobs, float), own, atol=1e-5)
        assert sequence.topk_logprobs is not None
        assert [len(each or ()) for each in sequence.topk_logprobs] == [2] * len(sequence.tokens)
        assert (sequence.stop_reason == "length") == (
            len(sequence.tokens) == 6 and sequence.tokens[-1] not in (1, 2, 4)
        )


def test_a_state_is_loaded_with_its_optimizer_or_without(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    step(training)
    path = training.save_state("one", user_metadata={"note": "first"}).result().path
    right = [step(training), step(training)]
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(whole), step(whole)] == right
    fresh = service.create_training_client_from_state(path).result()
    found = [step(fresh), step(fresh)]
    assert found[0]["loss"] == right[0]["loss"]
    assert found[1]["loss"] != right[1]["loss"]  # the first step had other moments
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(path).result()  # pyright: ignore[reportDeprecated]
    assert [step(training), step(training)] == right


def test_checkpoints_are_listed_changed_downloaded_and_deleted(url: str, training: tinker.TrainingClient) -> None:
    rest, run = tinker.RestClient(base_url=url, api_key=KEY), training.model_id
    state = training.save_state("state", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    weights = training.save_weights_for_sampler("weights").result().path
    files = training.save_weights_external("files").result().path
    listed = {each.tinker_path: each for each in rest.list_checkpoints(run).result().checkpoints}
    assert {each.checkpoint_type for each in listed.values()} == {"training", "sampler", "external"}
    assert listed[state].user_metadata == {"a": "b"}
    assert listed[state].expires_at is not None
    assert listed[weights].expires_at is None
    assert {state, weights, files} <= {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints}
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.publish_checkpoint_from_tinker_path(weights).result()
    listed = {each.tinker_path: each for each in rest.list_checkpoints(run).result().checkpoints}
    assert (listed[state].expires_at, listed[weights].public) == (None, True)
    rest.unpublish_checkpoint_from_tinker_path(weights).result()
    assert rest.get_weights_info_by_tinker_path(state).result().base_model == "tiny"
    described = rest.get_training_run(run).result()
    assert described.last_checkpoint is not None
    assert described.last_checkpoint.tinker_path == state
    assert rest.get_training_run_by_tinker_path(state).result().training_run_id == run
    assert run in {each.training_run_id for each in rest.list_training_runs().result().training_runs}
    urls = rest.get_external_weights_urls(files).result().urls
    with urllib.request.urlopen(urls["config.json"]) as answer:  # noqa: S310 -- loopback
        assert json.loads(answer.read())["model_type"] == "llama"
    used = tinker.AdminClient(base_url=url, api_key=KEY).get_current_checkpoint_storage_usage().result().data
    assert sum(each.checkpoint_count for each in used) >= 3
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert state not in {each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints}
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError, match="is no path"):
        rest.get_weights_info_by_tinker_path(f"tinker://{run}/weights/..").result()


def test_sessions_are_known_by_their_name(url: str) -> None:
    rest, service = tinker.RestClient(base_url=url, api_key=KEY), client(url)
    training = service.create_lora_training_client("tiny").result()
    sampler = service.create_sampling_client(base_model="tiny").result()
    name = service.holder.get_session_id()
    assert name in rest.list_sessions().result().sessions
    assert rest.get_session(name).result().training_run_ids == [training.model_id]
    assert rest.get_sampler(rest.get_session(name).result().sampler_ids[0]).result().base_model == "tiny"
    assert sampler.get_base_model() == "tiny"
    assert [each.model_name for each in rest.get_server_capabilities().result().supported_models] == ["tiny"]
    assert (training.get_info().model_data.tokenizer_id, training.get_info().is_lora) == ("tiny", False)
    service.close("success").result()
    assert post(url, "session_heartbeat", json.dumps({"session_id": name}).encode())[0] == 410


async def test_async_clients_have_several_requests_under_way(url: str) -> None:
    service = client(url)
    training = await service.create_lora_training_client("tiny")
    futures = [
        future
        for _ in range(4)
        for future in (training.forward_backward([ROW], "cross_entropy"), training.optim_step(ADAM))
    ]
    found = await asyncio.gather(*futures)
    sums = [(each.metrics or {})["loss:sum"] for each in found[::2]]
    assert sums == sorted(sums, reverse=True)
    sampler = await training.save_weights_and_get_sampling_client()
    draws = [sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=4)) for _ in range(8)]
    assert {len(each.sequences) for each in await asyncio.gather(*draws)} == {2}


def test_requests_in_any_order_and_again_are_each_applied_once(url: str, training: tinker.TrainingClient) -> None:
    other = client(url).create_lora_training_client("tiny").result()
    expected = [step(other), step(other)]

    def send(number: int) -> tuple[int, Any]:
        name = training.model_id
        if number % 2 == 0:
            body = {"model_id": name, "seq_id": number, "adam_params": {"learning_rate": 1e-2}, "type": "optim_step"}
            return post(url, "optim_step", json.dumps(body).encode())
        tensors = {
            "target_tokens": {"data": [5, 3, 8], "dtype": "int64"},
            "weights": {"data": [1, 1, 1], "dtype": "float32"},
        }
        chunks = [{"tokens": [1, 5, 3], "type": "encoded_text"}]
        rows = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}]
        passed = {"data": rows, "loss_fn": "cross_entropy"}
        body = {"model_id": name, "seq_id": number, "forward_backward_input": passed}
        return post(url, "forward_backward", json.dumps(body).encode())

    def result(number: int) -> Any:
        return post(url, "retrieve_future", json.dumps({"request_id": f"{training.model_id}:{number}"}).encode())[1]

    for number in (4, 2, 2, 3, 1, 1, 3):
        status, told = send(number)
        assert (status, told["request_id"]) == (200, f"{training.model_id}:{number}")
    assert [result(2)["metrics"], result(4)["metrics"]] == expected
    send(2)
    assert result(4)["metrics"] == expected[1]
    assert result(1)["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    body = {"model_id": training.model_id, "seq_id": 2, "adam_params": {"learning_rate": 5.0}}
    status, told = post(url, "optim_step", json.dumps(body).encode())
    assert (status, "came before with other content" in told["error"]) == (400, True)


REFUSED: dict[str, tuple[list[tinker.Datum], Any, Any, str]] = {
    "unknown": ([ROW], "no_loss", None, "there is no loss 'no_loss'"),
    "unpublished": ([ROW], "stable_reinforce", None, "is not published"),
    "setting": ([ROW], "cross_entropy", {"beta": 1.0}, "has no setting 'beta'"),
    "bound": ([ROW], "ppo", {"clip_low_threshold": 2.0}, "less than or equal to 1"),
    "lacking": ([datum([1, 5, 3])], "cross_entropy", None, "datum 0 has no weights"),
    "length": ([ROW, datum([1, 5, 3], weights=[1.0])], "cross_entropy", None, r"datum 1: weights has the shape \[1\]"),
    "targets": (
        [datum([1, 5, 3], weights=[1.0] * 2, target_tokens=[1])],
        "cross_entropy",
        None,
        "1 target_tokens for 2",
    ),
    "infinite": ([datum([1, 5], weights=[float("inf")])], "cross_entropy", None, "not finite"),
    "token": ([datum([1, 99, 3], weights=[1.0] * 2)], "cross_entropy", None, "99"),
    "long": ([datum([1] * 60, weights=[1.0] * 59)], "cross_entropy", None, "60 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_is_refused_takes_its_number(case: str, training: tinker.TrainingClient) -> None:
    data, name, settings, said = REFUSED[case]
    with pytest.raises(tinker.RequestFailedError, match=said) as raised:
        training.forward_backward(data, name, settings).result()
    assert raised.value.category == types.RequestErrorCategory.User
    assert step(training)["rows"] == 1


def test_what_is_missing_is_told(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.APIStatusError, match="no model 'large'"):
        service.create_lora_training_client("large").result()
    with pytest.raises(tinker.APIStatusError, match="there is no checkpoint"):
        service.create_sampling_client(model_path=f"tinker://{training.model_id}/sampler_weights/none").result()
    with pytest.raises(tinker.RequestFailedError, match="gradients"):
        training.optim_step(ADAM).result()
    training.forward_backward([ROW], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="call optim_step before save_state"):
        training.save_state("half").result()
    training.optim_step(ADAM).result()
    training.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="already"):
        training.save_state("twice").result()
    training.save_state("twice", overwrite=True).result()


def test_bodies_that_are_large_compressed_or_damaged(model: str, tmp_path: Path) -> None:
    with served(table(model, tmp_path, body_mib=1, compress=True)) as url:
        training = client(url).create_lora_training_client("tiny").result()
        assert step(training)["rows"] == 1  # compressed
        cut = b"\x0a\x05" + b"abc"
        assert post(url, "forward_backward", cut, "application/x-protobuf")[0] == 400
        assert post(url, "optim_step", b"{" * 100_000)[0] == 400
        assert post(url, "optim_step", b" " * (1 << 21))[0] == 413
        name = training.model_id.encode()
        large = b"\x0a" + bytes([len(name)]) + name + b"\x10\x03\x1a\xff\xff\xff\x07" + bytes(3 << 19)
        status, told = post(url, "forward_backward", large, "application/x-protobuf")
        failed = post(url, "retrieve_future", json.dumps({"request_id": told["request_id"]}).encode())[1]
        assert (status, failed["category"], "more than 1 MiB" in failed["error"]) == (200, "user", True)
