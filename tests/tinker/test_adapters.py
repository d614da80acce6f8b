"""Clients that train adapters on one base: each has the numbers that it has alone, whoever else trains and samples."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.tinker.served import KEY, client, datum, served, table

ADAM = types.AdamParams(learning_rate=2e-2)
WHOLE = types.ModelInput.from_ints([1, 5, 3, 8])


def adapted(model: str, folder: Path, **tinker: Any) -> dict[str, Any]:
    config = table(model, folder, **tinker)
    config["policy"]["lora"] = {"alpha": 8}
    return config


@pytest.fixture(scope="module")
def shared(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("adapters")
    with served(adapted(model, folder)) as url:
        yield url, folder


def row(number: int) -> tinker.Datum:
    tokens = np.random.default_rng(number).integers(3, 11, 6).tolist()
    return datum(tokens, weights=[1.0] * 5)


async def trained(service: tinker.ServiceClient, number: int) -> tuple[tinker.TrainingClient, list[float]]:
    """A model of its own rank and seed after three steps, with the loss of each."""
    training = await service.create_lora_training_client("tiny", rank=2 + number, seed=number)
    steps = [(training.forward_backward([row(number)], "cross_entropy"), training.optim_step(ADAM)) for _ in range(3)]
    return training, [(await passed).metrics["loss:sum"] for passed, stepped in steps if await stepped]


async def test_models_that_train_together_have_the_numbers_that_they_have_alone(shared: tuple[str, Path]) -> None:
    service = client(shared[0])
    alone = [(await trained(service, number))[1] for number in range(3)]
    together = await asyncio.gather(*(trained(service, number) for number in range(3)))
    assert [losses for _, losses in together] == alone
    assert all(losses == sorted(losses, reverse=True) for losses in alone)
    samplers = [await training.save_weights_and_get_sampling_client() for training, _ in together]
    base = await service.create_sampling_client(base_model="tiny")
    values = await asyncio.gather(*(each.compute_logprobs(WHOLE) for each in (base, *samplers)))
    for (training, _), found in zip(together, values[1:], strict=True):
        passed = await training.forward([datum([1, 5, 3, 8], weights=[1.0] * 3)], "cross_entropy")
        np.testing.assert_allclose(
            np.array(found[1:], float), passed.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-5
        )
    assert len({json.dumps(each) for each in values}) == 4
    info = together[1][0].get_info()
    assert (info.is_lora, info.lora_rank) == (True, 3)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # of transformers, by peft
async def test_peft_reads_what_is_downloaded(shared: tuple[str, Path], model: str, tmp_path: Path) -> None:
    training, _ = await trained(client(shared[0]), 1)
    path = (await training.save_weights_external("files")).path
    urls = (await tinker.RestClient(base_url=shared[0], api_key=KEY).get_external_weights_urls(path)).urls
    for name, link in urls.items():
        with urllib.request.urlopen(link) as answer:  # noqa: ASYNC210, S310 -- loopback
            (tmp_path / name).write_bytes(answer.read())
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path))
    right = network(torch.tensor([[1, 5, 3]])).logits[0].log_softmax(-1).detach()[[0, 1, 2], [5, 3, 8]]
    passed = await training.forward([datum([1, 5, 3, 8], weights=[1.0] * 3)], "cross_entropy")
    np.testing.assert_allclose(passed.loss_fn_outputs[0]["logprobs"].to_numpy(), right.numpy(), atol=1e-5)


async def test_models_beyond_the_room_take_turns_and_a_server_begins_again(model: str, tmp_path: Path) -> None:
    def more(trainings: list[tinker.TrainingClient]) -> list[float]:
        sums: list[float] = []
        for number, training in enumerate(trainings):
            sums.append(training.forward_backward([row(number)], "cross_entropy").result().metrics["loss:sum"])
        for training in trainings:
            training.optim_step(ADAM).result()
        return sums

    async def all_of(config: dict[str, Any], *, again: bool) -> list[list[float]]:
        with served(config) as url:
            service = client(url)
            trainings = [(await trained(service, number))[0] for number in range(2)]
            found = [more(trainings)]
            if not again:
                return [*found, more(trainings)]
        config["tinker"]["port"] = int(url.rpartition(":")[2])
        with served(config):
            return [*found, more(trainings)]

    right = await all_of(adapted(model, tmp_path / "roomy"), again=False)
    assert await all_of(adapted(model, tmp_path / "narrow", adapters=1, state_every=2), again=True) == right


def test_layers_are_chosen_as_the_client_says(shared: tuple[str, Path]) -> None:
    service = client(shared[0])
    made = {
        name: service.create_lora_training_client("tiny", rank=2, train_mlp=mlp, train_attn=attention).result()
        for name, mlp, attention in (("all", True, True), ("mlp", True, False), ("attention", False, True))
    }
    sizes: dict[str, int] = {}
    rest = tinker.RestClient(base_url=shared[0], api_key=KEY)
    for name, training in made.items():
        training.save_weights_for_sampler("w").result()
        (found,) = rest.list_checkpoints(training.model_id).result().checkpoints
        sizes[name] = found.size_bytes or 0
    assert sizes["all"] > max(sizes["mlp"], sizes["attention"])
