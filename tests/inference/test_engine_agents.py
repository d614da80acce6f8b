"""Agents on the samplers of engines, through the server that their clients talk to."""

import asyncio
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from meshrl import PolicyConfig, Sampling, Weights
from meshrl.agents import Gateway, read_chat
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.inference.conftest import MODEL

pytestmark = pytest.mark.slow


async def test_conversations_are_recorded_token_for_token_over_new_weights(
    backend: Any, sampler: EngineSampler
) -> None:
    """Eight conversations at once; the weights of the policy's second version come between two turns of each."""
    policy = TorchPolicy(PolicyConfig(model=MODEL))
    later = TorchPolicy(PolicyConfig(model=MODEL, seed=1))
    weights = Weights(1, (await later.weights()).tensors)
    gateway = Gateway(sampler, read_chat(backend.config(model=MODEL)))
    half, loaded = asyncio.Barrier(9), asyncio.Event()

    async def agent(words: list[str]) -> Any:
        session = gateway.open(Sampling(max_tokens=6, ignore_eos=True))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
        async with openai.AsyncOpenAI(base_url=session.url, api_key=session.token, http_client=http) as client:
            messages: list[Any] = []
            for word in words:
                messages.append({"role": "user", "content": word})
                told = await client.chat.completions.create(model="policy", messages=messages)
                messages.append(told.choices[0].message)
                if word == words[0]:
                    await half.wait()
                    await loaded.wait()
        return gateway.close(session)

    async def publish() -> None:
        await half.wait()
        await sampler.load(weights)
        loaded.set()

    agents = [agent(["abc"[: 1 + number % 3], "de f", "gh" * (1 + number)]) for number in range(8)]
    publishing = asyncio.create_task(publish())
    for rows in await asyncio.gather(*agents):
        assert len(rows) == 1
        learnt = np.asarray(rows.loss_mask.values, np.bool_)
        assert learnt.sum() == 18
        versions = rows.ragged("versions").values[learnt]
        assert versions.tolist() == [0] * 6 + [1] * 12
        by_version = [(await each.logprobs(rows)).ragged("logprobs").values[learnt] for each in (policy, later)]
        told = rows.sampler_logprobs.values[learnt]
        assert told[6:] == pytest.approx(by_version[1][6:], abs=1e-3)
        assert told[:6] == pytest.approx(by_version[0][:6], abs=1e-3)
    await publishing
