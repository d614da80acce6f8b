"""The cost of the Tinker server: its latency beside direct calls, and adapters that train together.

    python bench/tinker.py --json F [--rounds N]

latency     A forward_backward of 64 rows of 16 tokens for an adapter on a small model: the client's time from sending
            the request to having its result, against the time of the same call of the policy from the server's own
            loop. The bodies are in the SDK's form, and the client is a separate process with one connection
requests    Optimizer steps and passes of one row, sent one after the other, in requests per second
adapters    8 adapters on the same model, each a pass of 4 rows and a step: of 8 clients at once, and one after the
            other. With `share_passes`, rows of all of them share passes

The client uses the first core, and the models have one thread. The order of turns changes from round to round, and the
first round does not count. A minute or two.
"""

import asyncio
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from bench.harness import Figure, Worker, arguments, at_least, at_most, figure, median, report
from meshrl import NewModel, Policy, Run, RunConfig
from meshrl.roles import LoraConfig
from meshrl.tinker import ServedConfig, serving
from meshrl.tinker.models import tables_of
from meshrl.tinker.requests import pass_of_wire
from meshrl.tinker.rows import batch_of, loss_of
from meshrl.tinker.wire import message

ROWS: Final = 64
TOKENS: Final = 16
ADAPTERS: Final = 8
STEPS: Final = 10
MOST_ADDED: Final = 3.0
"""Milliseconds."""
LEAST_FASTER: Final = 3.0
MODEL: Final = NewModel(
    hidden_size=32, layers=1, characters="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY: \n", max_tokens=256
)

MESHES: Final = {"main": {"cpus": 1}}
"""The client has the other core."""


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--client", action="store_true", help="be the client")
    options = parser.parse_args()
    if options.client:
        print('{"ready": true}', flush=True)
        for line in sys.stdin:
            print(json.dumps(Client(**json.loads(line)).run()), flush=True)
        return
    with Worker([sys.executable, __file__, "--client"], threads=1) as client:
        report("tinker", asyncio.run(measured(client, options.rounds)), options.json)


class Client:
    """Clients with a connection each, which send what the SDK would send."""

    def __init__(self, url: str, what: str) -> None:
        """`what`: what to measure."""
        self._connections = [http.client.HTTPConnection(str(urlsplit(url).netloc)) for _ in range(ADAPTERS)]
        self._what = what

    def run(self) -> dict[str, float]:
        """Measure it in a new session."""
        session = self._post("create_session", {"tags": []})["session_id"]
        return {f"{self._what}_{name}": value for name, value in getattr(self, f"_{self._what}")(session).items()}

    def _latency(self, session: str) -> dict[str, float]:
        (model,) = self._models(session, 1)
        bodies = [body(model, number, ROWS, TOKENS) for number in range(1, STEPS + 1)]
        times: list[float] = []
        for each in bodies:
            began = time.perf_counter()
            self._result(self._post("forward_backward", each)["request_id"])
            times.append(time.perf_counter() - began)
        return {"ms": 1e3 * float(np.median(times))}

    def _requests(self, session: str) -> dict[str, float]:
        (model,) = self._models(session, 1)
        passes = [body(model, number, 1, 8) for number in range(1, 2 * STEPS, 2)]
        began = time.perf_counter()
        for place, each in enumerate(passes):
            self._result(self._post("forward_backward", each)["request_id"])
            self._result(self._post("optim_step", step(model, 2 * place + 2))["request_id"])
        return {"rate": 2 * STEPS / (time.perf_counter() - began)}

    def _adapters(self, session: str) -> dict[str, float]:
        models = self._models(session, ADAPTERS)
        times: dict[str, float] = {}
        for turn, together in enumerate((True, False, True, False)):
            number = 2 * turn + 2
            bodies = [body(model, number - 1, 4, 32) for model in models]
            began = time.perf_counter()
            if together:
                self._at_once("forward_backward", bodies)
                self._at_once("optim_step", [step(model, number) for model in models])
            else:
                for model, each in zip(models, bodies, strict=True):
                    self._result(self._post("forward_backward", each)["request_id"])
                    self._result(self._post("optim_step", step(model, number))["request_id"])
            times["together" if together else "alone"] = time.perf_counter() - began
        return times

    def _at_once(self, path: str, requests: Sequence[dict[str, Any] | bytes]) -> None:
        for client, each in enumerate(requests):
            self._send(path, each, client)
        waiting = [(client, str(self._receive(client)["request_id"])) for client in range(len(requests))]
        while waiting:
            for client, name in waiting:
                self._send("retrieve_future", {"request_id": name}, client)
            found = [self._receive(client) for client, _ in waiting]
            waiting = [each for each, one in zip(waiting, found, strict=True) if _is_missing(one)]

    def _models(self, session: str, count: int) -> list[str]:
        lora = {"rank": 8, "seed": 0}
        made = [
            {"session_id": session, "model_seq_id": each, "base_model": "small", "lora_config": lora}
            for each in range(count)
        ]
        names = [self._post("create_model", each)["request_id"] for each in made]
        return [str(self._result(name)["model_id"]) for name in names]

    def _result(self, name: str) -> dict[str, Any]:
        """Wait for a result, as often as the server says that it is not there yet."""
        found: dict[str, Any] = {"type": "try_again"}
        while _is_missing(found):
            found = self._post("retrieve_future", {"request_id": name})
        return found

    def _post(self, path: str, asked: dict[str, Any] | bytes) -> dict[str, Any]:
        self._send(path, asked, 0)
        return self._receive(0)

    def _send(self, path: str, asked: dict[str, Any] | bytes, client: int) -> None:
        kind = "application/x-protobuf" if isinstance(asked, bytes) else "application/json"
        raw = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        accept = "application/x-protobuf" if path == "retrieve_future" else "application/json"
        headers = {"Content-Type": kind, "Accept": accept, "X-API-Key": "tml-b"}
        self._connections[client].request("POST", f"/api/v1/{path}", raw, headers)

    def _receive(self, client: int) -> dict[str, Any]:
        answer = self._connections[client].getresponse()
        content = answer.read()
        assert answer.status in (200, 408), content
        found: dict[str, Any] = {} if "protobuf" in answer.headers["Content-Type"] else json.loads(content)
        assert "error" not in found, found
        return found


def _is_missing(found: dict[str, Any]) -> bool:
    return found.get("type") == "try_again"


def step(model: str, number: int) -> dict[str, Any]:
    """Make a step in the form of the SDK."""
    return {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-4}}


def body(model: str, number: int, rows: int, tokens: int) -> bytes:
    """Make a pass in the form of the SDK."""
    random = np.random.default_rng(number)
    data = []
    for _ in range(rows):
        ids = random.integers(3, 50, tokens + 1)
        text = message("Text", tokens=ids[:-1].astype(np.int32).tobytes())
        targets = message("Tensor", dense=ids[1:].astype(np.int64).tobytes(), dtype=2, shape=[tokens])
        weights = message("Tensor", dense=np.ones(tokens, np.float32).tobytes(), dtype=1, shape=[tokens])
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(message("Datum", model_input=[message("Chunk", encoded_text=text)], loss_fn_inputs=inputs))
    made = message("Pass", model_id=model, seq_id=number, data=data, loss_fn="cross_entropy")
    return bytes(made.SerializeToString())


async def measured(client: Worker, rounds: int) -> list[Figure]:
    """All figures, on one server."""
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        config = ServedConfig.model_validate(
            {
                "policy": {"model": MODEL, "lora": {}, "share_passes": True},
                "sampler": {"model": MODEL},
                "tinker": {"port": 0, "model": "small", "folder": str(Path(scratch, "state")), "state_every": 1000},
                "run": {"name": "tinker", "folder": scratch, "meshes": MESHES},
            }
        )
        async with serving(config) as (url, _):
            for turn in range(rounds + 1):
                for what in ("latency", "requests", "adapters"):
                    told = await asyncio.to_thread(client.ask, url=url, what=what)
                    for name, value in told.items() if turn else ():
                        values.setdefault(name, []).append(value)
                direct = await calls(config)
                if turn:
                    values.setdefault("direct", []).append(direct)
    through, direct = median(values["latency_ms"]), median(values["direct"])
    ratio = [alone / both for alone, both in zip(values["adapters_alone"], values["adapters_together"], strict=True)]
    return [
        figure("forward_backward of 64 rows through the server", through, "ms", direct),
        at_most("added by the server", through - direct, "ms", MOST_ADDED),
        figure("requests of one client, one after the other", median(values["requests_rate"]), "1/s"),
        at_least("8 adapters together, against one after the other", median(ratio), "times", 1.0, LEAST_FASTER),
    ]


async def calls(config: ServedConfig) -> float:
    """The time of the same call without a server, in ms."""
    with tempfile.TemporaryDirectory() as scratch:
        async with Run(RunConfig.model_validate({"name": "direct", "folder": scratch, "meshes": MESHES})) as run:
            policy = await run.spawn(Policy, tables_of(config)[0].policy)
            await policy.add_adapter("a", LoraConfig(rank=8, seed=0, sync="adapters"))
            times: list[float] = []
            for number in range(1, STEPS + 1):
                request = pass_of_wire(body("a", number, ROWS, TOKENS))
                batch = batch_of(request).assign(adapter=["a"] * ROWS)
                began = time.perf_counter()
                result = await (await policy.forward_backward(batch, loss_of(request))).load()
                times.append(time.perf_counter() - began)
                assert len(result.rows) == ROWS
            return 1e3 * float(np.median(times))


if __name__ == "__main__":
    main()
