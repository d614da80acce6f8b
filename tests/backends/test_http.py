import asyncio
import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors import SafetensorError

from meshrl import Batch, NewModel, PolicyConfig, SamplerConfig, Sampling, Weights, rollout
from meshrl.data import AdapterOf
from meshrl.errors import BackendError, ConfigError, DataError, EngineDied, ModelError
from meshrl_http.options import HttpConfig
from meshrl_http.sampler import HttpSampler
from meshrl_http.server_discovery import check_servers
from meshrl_torch.train.one_rank import TorchPolicy
from tests.first_hour.hub_server import serve

NEW = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=1, heads=2, max_tokens=64)
PROMPTS = Batch.of(prompt=["abc>", "hgfe>", "d>"])
GREEDY = Sampling(max_tokens=4, temperature=0, ignore_eos=True)

Answer = tuple[int, object]
"""A status, and what is sent as JSON; bytes are sent as they are, and None ends the connection without an answer."""


class Vllm(ThreadingHTTPServer):
    """What vLLM's server says, of a model that draws the token 3, always with the log-prob -1."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.model: dict[str, object] = {"id": "it", "owned_by": "vllm", "max_model_len": 64}
        self.tag: str | None = None
        self.headers: list[str | None] = []
        self.folders: list[str] = []
        self.completions = 0
        self.answers, self.updates, self.asked = threading.Event(), threading.Event(), threading.Event()
        """Whether it answers any request, takes new weights, and was asked to take them or to end requests."""
        self.answers.set()
        self.updates.set()
        self.instead: Callable[[dict[str, Any], int], Answer | None] = lambda _body, _number: None
        """What it answers to a request for a completion, the first having the number 1; None: what it should."""

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.answers.wait()
        plain: dict[str, object] = {"/v1/models": {"data": [self.model]}, "/version": {"version": "0"}}
        if path in plain:
            return 200, plain[path]
        if path == "/v1/completions":
            self.completions += 1
            echoed = [None, *[-1.0] * (len(body["prompt"]) - 1)] if body.get("echo") else []
            return self.instead(body, self.completions) or chosen(*echoed, *[-1.0] * int(body["max_tokens"]))
        if self.tag is None:
            return 404, {"detail": "Not Found"}
        if path in ("/abort_requests", "/collective_rpc"):
            self.asked.set()
        if path == "/collective_rpc":
            self.updates.wait()
            self.folders.append(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            self.tag = body["new_version"]
        return 200, {"weight_version": self.tag}


def chosen(*logprobs: float | None, **other: object) -> Answer:
    told = {"token_ids": [3] * len(logprobs), "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}
    return 200, {"choices": [{**told, **other}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Vllm  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, *arguments: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing."""

    def do_GET(self) -> None:
        self._tell({})

    def do_POST(self) -> None:
        self._tell(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _tell(self, body: dict[str, Any]) -> None:
        self.server.headers.append(self.headers["Authorization"])
        status, told = self.server.answer(self.path.partition("?")[0], body)
        if told is None:
            self.close_connection = True
            return
        sent = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        with suppress(BrokenPipeError):  # nobody waits for it any more
            self.wfile.write(sent)


@contextmanager
def serving() -> Generator[Vllm]:
    with serve(made := Vllm()):
        yield made


@pytest.fixture
def server() -> Iterator[Vllm]:
    with serving() as made:
        yield made


def config(*urls: str, **options: object) -> SamplerConfig:
    return SamplerConfig.model_validate(
        {"backend": "http", "model": NEW, "slots": 4, "http": {"urls": urls, "patience": 20.0, **options}}
    )


def sampling(*urls: str, **options: object) -> closing[HttpSampler]:
    return closing(HttpSampler(config(*urls, **options)))


def drawn(made: HttpSampler, how: Sampling = GREEDY) -> Batch:
    return asyncio.run(rollout(made, PROMPTS, how))


def test_rows_are_what_a_server_draws_and_its_key_is_sent(server: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_TEST", "open sesame")
    made = config(f"{server.url}/v1/", key_env="KEY_OF_THIS_TEST")
    with sampling(f"{server.url}/v1/", key_env="KEY_OF_THIS_TEST") as sampler:
        rows = drawn(sampler)
    assert list(rows.objects("completion")) == ["bbbb"] * 3
    assert rows.sampler_logprobs[0][-4:].tolist() == [-1.0] * 4
    assert set(server.headers) == {"Bearer open sesame"}
    assert "sesame" not in made.model_dump_json()
    monkeypatch.delenv("KEY_OF_THIS_TEST")
    with pytest.raises(ConfigError, match="KEY_OF_THIS_TEST is not set here"):
        HttpSampler(made)


def test_what_may_be_answered_the_next_time_is_asked_again(server: Vllm) -> None:
    wrongs: list[Answer] = [
        (503, {"error": "busy"}), (429, {}), (500, {}), (502, b"<html>a proxy's page"), (200, b'{"choices": [{'),
        (200, None),
    ]  # fmt: skip
    with sampling(server.url) as sampler, sampling(server.url, patience=0.5) as impatient:
        begun = server.completions
        server.instead = lambda _, number: wrongs[(number - begun) // 2] if number - begun in range(1, 12, 2) else None
        for _ in range(4):
            assert [len(row) for row in drawn(sampler).tokens] == [8, 9, 6]
        assert server.completions >= begun + 12 + len(wrongs)
        server.instead = lambda _body, _number: (503, {"error": "never again"})
        for words in (r"no answer from http://127.*never again.*patience = 0.5", "respawn the sampler"):
            with pytest.raises(EngineDied, match=words):
                drawn(impatient)
    server.instead = lambda _body, _number: None
    with serving() as other, sampling(server.url, other.url) as sampler:
        other.instead = lambda _body, _number: (503, {})  # rows go to the server that answers
        assert list(drawn(sampler).objects("completion")) == ["bbbb"] * 3


def test_a_server_that_does_not_tell_what_is_trained_on_is_refused(server: Vllm) -> None:
    for missing, what in (("token_ids", "token ids"), ("logprobs", "log-probs")):
        lacking = chosen(-1.0, **{missing: None})
        server.instead = lambda _body, _number, lacking=lacking: lacking  # type: ignore[misc]
        with pytest.raises(ModelError, match=f"returns no {what} of its tokens"):
            HttpSampler(config(server.url))
        with pytest.raises(BackendError, match=f"returns no {what} of its tokens"):
            check_servers(config(server.url))


def test_what_a_server_does_not_draw_by_is_refused(server: Vllm) -> None:
    heated: list[int] = []

    def rounded(body: dict[str, Any], number: int) -> Answer | None:
        heated.extend([number] if body["temperature"] == 2.0 else [])
        return chosen(-3.0) if heated == [number] else None

    server.instead = rounded  # one probe that the server reads otherwise says nothing
    for how, words in (
        (Sampling(temperature=0.5), r"at temperature 1, but rows are sampled at 0.5"),  # -1 at 2 and at 1
        (Sampling(top_p=0.5), r"log-probs of the tokens that top_p = 0.5 leave"),
        (Sampling(temperature=3), "cannot sample at temperature 3"),
    ):
        with sampling(server.url) as sampler, pytest.raises(DataError, match=words):
            drawn(sampler, how)
        server.instead = lambda body, _number: chosen(0.0) if body["top_k"] == 1 else None


def test_servers_that_cannot_be_used_are_told_before_a_run(server: Vllm, tmp_path: Path) -> None:
    for made, words in (
        (config(server.url, model="other"), "serves 'it', and not sampler.http.model = 'other'"),
        (config(server.url, weights=str(tmp_path)), "VLLM_SERVER_DEV_MODE=1"),
        (config("http://127.0.0.1:9"), r"no answer from http://127.0.0.1:9: .*Is a server running there"),
        (config(), "names no server"),
    ):
        with pytest.raises(BackendError, match=words):
            check_servers(made)
    server.model["owned_by"] = "llamacpp"
    with pytest.raises(BackendError, match="neither a vLLM nor an SGLang server"):
        check_servers(config(server.url))
    with pytest.raises(ConfigError, match="1 servers for 2 ranks"):
        HttpConfig(urls=("http://a",)).share(0, 2)
    for wrong in ("ftp://a", "a:80"):
        with pytest.raises(ValidationError, match="is not the address of a server"):
            HttpConfig(urls=(wrong,))
    for wrong in ("http://user:secret@a", "ftp://user:secret@a", "user:secret@a:80"):
        with pytest.raises(ValidationError, match="key_env") as told:
            HttpConfig(urls=(wrong,))
        assert "secret@" not in told.value.errors()[0]["msg"]


def new_weights(version: int) -> Weights:
    weights = asyncio.run(TorchPolicy(PolicyConfig(model=NEW, seed=version)).weights())
    return Weights.of(version, weights.buckets)  # of no probe: this server computes nothing


def test_a_server_that_was_started_anew_is_given_its_weights_again(server: Vllm, tmp_path: Path) -> None:
    server.tag = "default"
    with sampling(server.url, weights=str(tmp_path)) as sampler:
        asyncio.run(sampler.load(new_weights(3)))
        assert [Path(folder).name for folder in server.folders] == ["model", "version-3-1"]
        last = server.folders[-1]
        server.tag = "default"
        rows = drawn(sampler)
        assert server.folders[2:] == [last]
        assert {path.name for path in Path(last).iterdir()} >= {"config.json", "model-00001.safetensors"}
        assert set(rows.versions[0][-4:].tolist()) == {3}
    assert not list(tmp_path.iterdir()), "its folders go with it"


def test_an_adapter_alone_is_refused_in_words_and_not_by_its_tensors(server: Vllm, tmp_path: Path) -> None:
    alone = Weights(5, {"layer.lora_A.weight": np.zeros((2, 2), np.float32)}, AdapterOf("maths", 2, 4))
    server.tag = "default"
    with sampling(server.url, weights=str(tmp_path)) as sampler:
        with pytest.raises(ModelError, match=r"version 5 .* adapter 'maths' alone, .* 'http' needs whole weights"):
            asyncio.run(sampler.load(alone))
        assert set(drawn(sampler).versions[0][-4:].tolist()) == {0}


def test_a_row_goes_on_with_new_weights_and_nothing_cached_of_old_ones(server: Vllm, tmp_path: Path) -> None:
    server.tag, begun, salts = "default", threading.Event(), list[str]()
    old, new = new_weights(3), new_weights(4)

    def half(body: dict[str, Any], _number: int) -> Answer:
        salts.append(body["cache_salt"])
        if len(salts) == 1:
            begun.set()
            server.asked.wait()
        return chosen(-1.0, -1.0)

    async def draw(sampler: HttpSampler) -> Batch:
        await sampler.load(old)
        server.asked.clear()
        server.instead = half
        row = asyncio.ensure_future(rollout(sampler, PROMPTS.select([0]), GREEDY))
        await asyncio.to_thread(begun.wait)
        await sampler.load(new)
        return await row

    with sampling(server.url, weights=str(tmp_path)) as sampler:
        assert asyncio.run(draw(sampler)).versions[0][-4:].tolist() == [3, 3, 4, 4]
    assert len(set(salts)) == 2


def test_a_row_that_leaves_while_old_weights_are_given_holds_no_new_ones_up(server: Vllm, tmp_path: Path) -> None:
    server.tag = "default"
    old, new = new_weights(3), new_weights(4)

    async def leave(sampler: HttpSampler) -> None:
        await sampler.load(old)
        server.tag = "default"  # it was started anew
        server.updates.clear()
        server.asked.clear()
        row = asyncio.ensure_future(rollout(sampler, PROMPTS, GREEDY))
        await asyncio.to_thread(server.asked.wait)
        row.cancel()
        await asyncio.gather(row, return_exceptions=True)
        loaded = asyncio.ensure_future(sampler.load(new))
        for _ in range(100):
            await asyncio.sleep(0)
        server.updates.set()
        await loaded

    with sampling(server.url, weights=str(tmp_path)) as sampler:
        asyncio.run(leave(sampler))
    assert Path(server.folders[-1]).name.startswith("version-4-")
    assert str(server.tag).endswith("-version-4")


def test_refused_weights_can_be_given_again(server: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sampling(server.url) as sampler:
        with pytest.raises(ModelError, match=r"sampler\.http\.weights is not set"):
            asyncio.run(sampler.load(new_weights(2)))
        assert len(drawn(sampler)) == 3
    server.tag = "default"

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    with sampling(server.url, weights=str(tmp_path)) as sampler:
        with monkeypatch.context() as disk:
            disk.setattr("meshrl_http.folders.save_file", full)
            with pytest.raises(ModelError, match=r"cannot be written into sampler\.http\.weights: .*No space left"):
                asyncio.run(sampler.load(new_weights(3)))
        asyncio.run(sampler.load(new_weights(3)))
    assert Path(server.folders[-1]).name.startswith("version-3-")


def test_a_server_that_never_answers_ends_the_sampler(server: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl_http.client.SHORT", 0.2)

    def stopped(_body: object, _number: int) -> Answer:
        server.answers.clear()
        server.answers.wait()
        return 503, {}

    with sampling(server.url, patience=0.5) as sampler:
        server.instead = stopped
        try:
            with pytest.raises(EngineDied, match=r"no answer from .*patience = 0\.5"):
                drawn(sampler)
        finally:
            server.answers.set()
