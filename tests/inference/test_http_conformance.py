"""The http sampler against the suite that each sampler must pass, on the servers that vLLM and SGLang bring."""

import asyncio
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import meshrl_sglang
from meshrl import PolicyConfig
from meshrl.engines.remote.messages import reserved_port
from meshrl.testing.conformance import SAMPLER, Check, Harness, Subject, draws
from meshrl.testing.conformance.material import SAMPLED, SLOTS
from meshrl_torch.train.one_rank import TorchPolicy
from tests.conformance.kits import keep
from tests.inference.test_engine_conformance import COVERING

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3000)]

UNSEEDED = (draws.seeds, draws.calls_beside)
"""What hangs on a row's seed, which SGLang reads in its deterministic mode alone; a CPU has no kernels for that."""
OTHERS = [check for check in SAMPLER if check not in COVERING]


class Server(NamedTuple):
    name: str
    url: str
    weights: Path
    process: int


def command(name: str, python: str | None, folder: Path, port: int) -> list[str]:
    here = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    vllm = (
        f"vllm.entrypoints.openai.api_server --model {folder} --logprobs-mode processed_logprobs --max-num-seqs {SLOTS}"
        f" --kv-cache-memory-bytes {32 << 20} --enforce-eager --no-enable-chunked-prefill"
    )
    sglang = (
        f"sglang.launch_server --model-path {folder} --context-length {SAMPLED.max_tokens + 8} --max-running-requests"
        f" {SLOTS} --max-total-tokens 4096 --device cpu --attention-backend torch_native --sampling-backend pytorch"
        " --grammar-backend none --log-level warning --disable-cuda-graph --disable-overlap-schedule --sleep-on-idle"
        " --skip-server-warmup"
    )
    return [str(python), "-m", *{"vllm": vllm, "sglang": sglang}[name].split(), *here]


def variables(name: str) -> dict[str, str]:
    standins = Path(str(meshrl_sglang.__file__)).parent / "standins"
    own = {
        "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "sglang": {
            "PYTHONPATH": str(standins),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        },
    }
    shared = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, "PYTHONPATH": "", **shared, **own[name]}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:  # noqa: S310 -- an address of this test
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def server(backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("server")
    asyncio.run(TorchPolicy(PolicyConfig(model=SAMPLED, seed=7)).save(str(place / "model")))
    untied(place / "model")
    with reserved_port() as reserving:
        port = int(reserving.getsockname()[1])
        (place / "shared").mkdir()
        with (place / "log").open("wb") as log:
            asked, environment = command(backend.name, backend.python, place / "model", port), variables(backend.name)
            process = subprocess.Popen(
                asked, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=place
            )
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert process.poll() is None, (place / "log").read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield Server(backend.name, url, place / "shared", process.pid)
        os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def untied(folder: Path) -> None:
    """With a head of its own: so one server holds the weights of models whose head is tied, and of others.

    And on a CPU a reload of vLLM leaves a head that is tied to the embeddings as it was.
    """
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415 -- for this alone

    held = load_file(folder / "model.safetensors").items()
    tensors = {name: array * 8 if array.ndim == 2 else array for name, array in held}  # else all tokens are as probable
    head = tensors["model.embed_tokens.weight"].copy()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), "utf-8")


@pytest.mark.parametrize("checks", [COVERING, pytest.param(OTHERS, marks=pytest.mark.wide)], ids=["covering", "others"])
async def test_the_sampler_conforms(
    server: Server, harness_of: Callable[[Subject], Awaitable[Harness]], checks: Sequence[Check]
) -> None:
    keys = {"http": {"urls": [server.url], "weights": str(server.weights)}}
    temperatures, most = {"vllm": ((0.01, 2.0), 0), "sglang": ((1e-6, float("inf")), 1)}[server.name]
    subject = Subject("http", keys=keys, temperatures=temperatures, replays=False, restrictions=most)
    asked = [check for check in checks if server.name != "sglang" or check not in UNSEEDED]
    await keep(await harness_of(subject), asked)
