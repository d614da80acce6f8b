"""The cost of the gateway: CPU time of a request with fakes, and the speed of a real sampler behind it.

    python bench/gateway.py --json F [--rounds N]

The load is 256 concurrent sessions of 4 turns each. Their client is the package openai, in a separate process on the
first core. Each turn sends the whole history.

fakes    A sampler and a chat template that only copy text, in the server's process, with messages and answers of 128
         characters. The CPU time of that process, user and system, counts from before the sessions are opened to when
         their rows are made, divided by the 1,024 requests. It includes the fake sampler's own time for the same rows,
         which is reported too
torch    The quickstart's model, with a tokenizer and a chat template of Hugging Face. The sampler is a rank of one
         thread on the engine `processes`. Messages have 32 tokens, answers log-uniform 8 to 256. Tokens per second of
         the answers, against the same 1,024 rows with the same prompts and lengths, drawn by one call of `generate`
         that decodes as many rows at once as there are sessions

The order of turns changes from round to round, and the first round does not count. A few minutes.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

import httpx2
import numpy as np
import openai
from numpy.typing import NDArray

from bench.harness import Figure, Worker, arguments, at_least, at_most, figure, median, report
from meshrl import Batch, NewModel, Ragged, Run, RunConfig, Sampler, SamplerConfig, Sampling
from meshrl.agents import Gateway, GatewayConfig
from meshrl.data import Source
from meshrl.run import MeshConfig
from meshrl.testing import ScriptedChat, ScriptedSampler
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.text import Words, character_tokenizer

SESSIONS: Final = 256
TURNS: Final = 4
REQUESTS: Final = SESSIONS * TURNS
MOST_CPU: Final = 2.0
"""Milliseconds per request."""
LEAST_SPEED: Final = 0.9
"""Share of the speed of `generate` alone."""
MODEL: Final = NewModel(characters="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY: \n", max_tokens=2048)
TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--client", action="store_true", help="be the client")
    options = parser.parse_args()
    if options.client:
        print('{"ready": true}', flush=True)
        for line in sys.stdin:
            asyncio.run(talk_all(**json.loads(line)))
            print('{"done": true}', flush=True)
        return
    with Worker([sys.executable, __file__, "--client"], threads=1) as client:
        figures = [*asyncio.run(on_fakes(client, options.rounds)), *asyncio.run(on_torch(client, options.rounds))]
    report("gateway", figures, options.json)


async def on_fakes(client: Worker, rounds: int) -> list[Figure]:
    """CPU time per request, and the fake sampler's part of it."""
    sampler = ScriptedSampler(lambda prompt: prompt[-128:])
    limits = np.full((SESSIONS, TURNS), 128)
    whole, fakes = list[float](), list[float]()
    async with Gateway(sampler, ScriptedChat(), GatewayConfig()).serving() as gateway:
        for _ in range(rounds + 1):
            began = time.process_time()
            rows = await episodes(gateway, client, limits, 128)
            whole.append((time.process_time() - began) / REQUESTS * 1e3)
            asked = turns_of(rows)
            began = time.process_time()
            async for batch in sampler.generate(asked, Sampling(max_tokens=128)):
                await batch.load()
            fakes.append((time.process_time() - began) / REQUESTS * 1e3)
    return [
        at_most("CPU of a request", median(whole[1:]), "ms", MOST_CPU),
        figure("CPU of a request, the fake sampler's part", median(fakes[1:]), "ms"),
    ]


async def on_torch(client: Worker, rounds: int) -> list[Figure]:
    """Tokens per second through the gateway, and by `generate`."""
    limits = np.exp(np.random.default_rng(0).uniform(np.log(8), np.log(257), (SESSIONS, TURNS))).astype(np.int64)
    tokenizer = character_tokenizer(MODEL.characters, MODEL.max_tokens)
    tokenizer.chat_template = TEMPLATE
    chat = HuggingFaceChat(Words(tokenizer, None, frozenset({1}), MODEL.max_tokens, known=len(tokenizer)))
    walls: dict[str, list[float]] = {"gateway": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder:
        meshes = {"sampler": MeshConfig(cpus=1)}
        async with Run(RunConfig(folder=folder, engine="processes", meshes=meshes, log=[], name="gateway")) as run:
            sampler = await run.spawn(Sampler, SamplerConfig(model=MODEL, slots=SESSIONS, mesh="sampler"))
            async with Gateway(sampler, chat).serving() as gateway:
                for _ in range(rounds + 1):
                    began = time.perf_counter()
                    rows = await episodes(gateway, client, limits, 32)
                    walls["gateway"].append(time.perf_counter() - began)
                    asked = turns_of(rows)
                    assert int(asked.row("max_tokens").sum()) == int(limits.sum())
                    began = time.perf_counter()
                    async for batch in sampler.generate(asked.part(np.arange(len(asked))), Sampling(ignore_eos=True)):
                        await batch.load()
                    walls["alone"].append(time.perf_counter() - began)
    speed = {name: float(limits.sum()) / median(seconds[1:]) for name, seconds in walls.items()}
    return [at_least("episodes on torch", speed["gateway"], "tokens/s", speed["alone"], LEAST_SPEED)]


async def episodes(gateway: Gateway, client: Worker, limits: NDArray[np.int64], characters: int) -> Batch:
    """Rows of the client's sessions, one each. `limits`: tokens of each answer, int[sessions, turns]."""
    sessions = [gateway.open(Sampling(max_tokens=512, ignore_eos=True)) for _ in limits]
    told = [(session.url, session.token, each) for session, each in zip(sessions, limits.tolist(), strict=True)]
    await asyncio.to_thread(client.ask, sessions=told, characters=characters)
    rows = [gateway.close(session) for session in sessions]
    assert all(len(each) == 1 for each in rows), "an answer that came back was not found again"
    return Batch.concat(rows)


def turns_of(rows: Batch) -> Batch:
    """The requests: one row per turn, with its prompt as tokens and the number of drawn tokens."""
    prompts, limits = list[NDArray[np.int32]](), list[int]()
    for tokens, learnt in zip(rows.tokens, rows.loss_mask, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learnt, [False]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2).tolist():
            prompts.append(np.array(tokens[:start], np.int32))
            limits.append(end - start)
    return Batch.of(
        prompt=[""] * len(prompts),
        observation=[None] * len(prompts),
        tokens=Ragged.of(prompts, np.int32),
        loss_mask=Ragged.of([np.zeros(len(each), np.bool_) for each in prompts], np.bool_),
        sampler_logprobs=Ragged.of([np.zeros(len(each)) for each in prompts], np.float32, source=Source("sampler")),
        versions=Ragged.of([np.full(len(each), -1) for each in prompts], np.int32),
        max_tokens=np.array(limits, np.int64),
    )


async def talk_all(sessions: Sequence[tuple[str, str, Sequence[int]]], characters: int) -> None:
    """The client: all sessions at once."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(limits=limits, timeout=600) as http:
        await asyncio.gather(*(talk(http, *session, characters) for session in sessions))


async def talk(http: httpx2.AsyncClient, url: str, token: str, limits: Sequence[int], characters: int) -> None:
    """One session. Each message follows the answer to the previous one."""
    client = openai.AsyncOpenAI(base_url=url, api_key=token, http_client=http)
    messages = list[Any]()
    for turn, most in enumerate(limits):
        messages.append({"role": "user", "content": "abcdefgh"[turn] * characters})
        told = await client.chat.completions.create(model="policy", messages=messages, max_tokens=most)
        messages.append(told.choices[0].message)


if __name__ == "__main__":
    main()
