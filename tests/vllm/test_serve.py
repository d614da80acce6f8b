"""`meshrl serve` on vLLM's real server: it answers as transformers does, and follows a run that goes on."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshrl.engines.remote.messages import reserved_port
from tests.inference.conftest import Backend
from tests.inference.networks import greedy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORDS = [first + second for first in "abcdefgh" for second in "abcdefgh"]
CONFIG = """
algorithm = "sft"
rows = 8
steps = 6
run = { name = "tiny", checkpoint_every = 4 }
task = { source = "words.jsonl", held_out = 0 }
policy.model = { characters = "abcdefgh>", hidden_size = 64, ffn_size = 96, layers = 2, heads = 2, max_tokens = 192 }
policy.optimizer.lr = 1e-2
sampler.vllm.python = "/nowhere/an-interpreter-of-the-folder"
"""
PROMPTS = [[2, 3, 10], [9, 8, 10], [4], [2, 3, 4] * 50]
"""The last one fills a block of keys and values, which vLLM keeps for others that begin like it."""
MESHRL = [sys.executable, "-c", "from meshrl.cli import main; main()"]


class Served(NamedTuple):
    run: Path
    server: "subprocess.Popen[str]"
    port: int

    def says(self) -> str:
        assert self.server.stdout
        return self.server.stdout.readline().strip()

    def post(self, path: str, body: object, method: str = "POST") -> tuple[int, bytes]:
        """The status and the content of the answer to somebody who has no key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        with closing(connection):
            connection.request(method, f"/{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ask(self, prompt: list[int], **asked: object) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        _, content = self.post("v1/completions", {**body, **asked})
        tokens: list[int] = json.loads(content)["choices"][0]["token_ids"]
        return tokens


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A run that was killed after its checkpoint, as it were, and a server that follows it."""
    (tmp_path / "words.jsonl").write_text(
        "".join(f'{{"question": "{word}>", "answer": "{word[::-1]}"}}\n' for word in WORDS)
    )
    (tmp_path / "tiny.toml").write_text(CONFIG)
    subprocess.run([*MESHRL, "run", "tiny.toml"], cwd=tmp_path, check=True, capture_output=True)
    run = tmp_path / "runs" / "tiny"
    (run / "model").rename(tmp_path / "finished")
    shutil.rmtree(run / "checkpoints" / "step-000006")  # that of the end
    with reserved_port() as reserving:
        port = reserving.getsockname()[1]
        python = Backend("vllm").python or sys.executable
        command = [*MESHRL, "serve", "tiny", "--follow", "--port", str(port), "--python", python]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        yield Served(run, server, port)
        server.terminate()
        server.wait()
        assert server.stdout
        server.stdout.close()


def test_a_run_is_served_and_followed(served: Served) -> None:
    finished = served.run.parents[1] / "finished"
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(finished)
    after = greedy(network, PROMPTS)
    checkpoint = served.run / "checkpoints" / "step-000004"
    state = load_file(checkpoint / "0-policy" / "shard-00001-model-00001-of-00001.safetensors")
    tensors = {name.removeprefix("model/"): each for name, each in state.items() if name.startswith("model/")}
    network.load_state_dict(tensors, strict=False)  # the head is the embeddings
    before = greedy(network, PROMPTS)
    assert before != after, "nothing would tell the two apart"

    assert served.says() == f"{checkpoint.resolve()} is loaded"
    assert served.says() == f"http://127.0.0.1:{served.port} answers: try"
    shell = subprocess.run(["bash", "-c", served.says()], capture_output=True, text=True, check=True)  # noqa: S607
    assert json.loads(shell.stdout)["model"] == "tiny"
    assert [served.ask(prompt, temperature=0) for prompt in PROMPTS] == before

    assert [served.post(path, {})[0] for path in ("pause", "collective_rpc", "reset_prefix_cache")] == [401, 401, 401]
    assert served.post("health", {}, "GET")[0] == 200

    over, lengths = threading.Event(), list[int]()

    def keep_asking() -> None:
        while not over.is_set():
            lengths.append(len(served.ask([4], max_tokens=120)))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    finished.rename(served.run / "model")
    os.utime(served.run / "model")
    assert served.says() == f"{(served.run / 'model').resolve()} is served"
    over.set()
    asking.join()
    assert set(lengths) == {120}  # generation went on
    assert [served.ask(prompt, temperature=0) for prompt in PROMPTS] == after

    served.server.terminate()  # as Ctrl-C, which who starts tests in the background has turned off
    assert served.server.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port))
