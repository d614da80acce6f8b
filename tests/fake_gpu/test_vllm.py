"""vLLM's build for CUDA as a sampler on fake GPUs: what it draws, the memory that it holds, and runs of GRPO."""

import re
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from transformers import LlamaConfig

from meshrl import Batch, PolicyConfig, Sampling, Weights, rollout
from meshrl.errors import ModelError
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.sampler import VllmSampler
from tests.algorithms.pages import run_page
from tests.algorithms.test_on_torch import MODEL as SMALL
from tests.algorithms.test_on_torch import letter_b
from tests.backends.material import floats
from tests.inference.conftest import MODEL, ROOT, Backend
from tests.inference.networks import PROMPTS, SHAPE, distances, greedy, two
from tests.inference.test_engine_adapters import TABLE

PYTHON = ROOT / ".venv-fake-vllm" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-fake-vllm: `make fake-vllm`")
OWN = {"python": str(PYTHON), "eager": True, "kv_cache_mib": 32}
"""Without CUDA graphs, which a fake GPU does not compute."""
WIDER = {**SMALL, "hidden_size": 64, "ffn_size": 96}
"""With heads as wide as FlashAttention takes."""
MIB = 2**20


SHORT = Sampling(max_tokens=4, temperature=0, ignore_eos=True)


def answers(drawn: Batch) -> list[list[int]]:
    return [row[np.asarray(mask, np.bool_)].tolist() for row, mask in zip(drawn.tokens, drawn.loss_mask, strict=True)]


def sampler_of(**table: Any) -> EngineSampler:
    keys: dict[str, object] = {**OWN, **table.pop("keys", {})}
    return VllmSampler(Backend("vllm").config(slots=8, keys=keys, **table))


def policy(seed: int) -> PolicyConfig:
    return PolicyConfig(model=MODEL, dtype="bfloat16", seed=seed)


WITHOUT = """
import torch, vllm._C_stable_libtorch
states = torch.ones(2, device="cuda")
graph = torch.cuda.CUDAGraph()
for run in (lambda: torch.ops._C.gelu_fast(torch.empty_like(states), states), graph.replay):
    try:
        run()
    except NotImplementedError as error:
        print(str(error).split("with arguments")[0])
"""


def test_what_has_no_numbers_is_an_error() -> None:
    command = [str(PYTHON), "-c", WITHOUT]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0] == "Could not run '_C::gelu_fast' "
    assert told[1].startswith("a CUDA graph has no numbers on a fake GPU")


class Narrow(NamedTuple):
    """A sampler in bfloat16, which sleeps, and weights of two policies."""

    sampler: EngineSampler
    weights: list[Weights]
    ledger: Path

    @property
    def used(self) -> int:
        """Bytes of the first GPU."""
        return int(struct.unpack_from("q", self.ledger.read_bytes())[0])


@pytest.fixture(scope="module", autouse=True)
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of these tests alone, because engines leave their bytes in it."""
    file = tmp_path_factory.mktemp("ledger") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_LEDGER", str(file))
        yield file


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def narrow(ledger: Path) -> AsyncIterator[Narrow]:
    sampler = sampler_of(model=MODEL, dtype="bfloat16", keys={"sleep": True})
    yield Narrow(sampler, [await TorchPolicy(policy(seed)).weights() for seed in range(2)], ledger)
    sampler.close()


async def apart(made: TorchPolicy, drawn: Batch, version: int) -> float:
    """How far the log-probs of the tokens that a version drew are from a policy's."""
    known = await made.logprobs(drawn)
    mine = np.asarray(drawn.versions.values) == version
    found, wanted = floats(drawn.sampler_logprobs.values), floats(known.ragged("logprobs").values)
    return float(np.abs(found - wanted)[mine].max())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gpu_is_free_while_no_row_is_decoded_and_weights_come_in_flight(narrow: Narrow) -> None:
    sampler, asleep = narrow.sampler, narrow.used
    await sampler.load(narrow.weights[0].with_version(1))  # a probe that differs from the policy's is an error
    assert narrow.used == asleep
    rows = Batch.of(prompt=["abc>"] * 400, max_tokens=np.where(np.arange(400) < 4, 200, 4))
    stream = aiter(sampler.generate(rows, Sampling(ignore_eos=True)))
    drawn = [await anext(stream)]
    assert narrow.used > asleep + 32 * MIB, "the keys and values alone are 32 MiB"
    await sampler.load(narrow.weights[1].with_version(2))
    while 2 not in drawn[-1].versions.values:
        drawn.append(await anext(stream))
    await sampler.abort()
    drawn += [batch async for batch in stream]
    assert narrow.used == asleep
    everything = Batch.concat(drawn)
    assert {1, 2} <= set(everything.versions[np.flatnonzero(everything.row("max_tokens") == 200)[0]].tolist())
    for version in (1, 2):
        own, other = (TorchPolicy(policy(seed)) for seed in (version - 1, 2 - version))
        assert await apart(own, everything, version) < 1e-2 < await apart(other, everything, version)


async def test_in_float32_rows_are_those_of_transformers(tmp_path: Path) -> None:
    networks, _ = await two(LlamaConfig(**SHAPE, tie_word_embeddings=True), tmp_path)
    sampler = sampler_of(model=str(tmp_path / "0"))
    drawn = await (await rollout(sampler, PROMPTS, SHORT)).load()
    sampler.close()
    assert answers(drawn) == [row[:4] for row in greedy(networks[0])]
    assert distances(networks[0], drawn).max() < 1e-4


def test_adapters_in_float32_are_refused_on_gpus() -> None:
    with pytest.raises(ModelError, match=r'adapters on GPUs cannot read float32: set sampler\.dtype = "bfloat16"'):
        sampler_of(model=MODEL, adapters={"maths": TABLE})


@pytest.mark.parametrize(
    ("meshes", "sync", "route"),
    [
        pytest.param(1, "auto", "shared memory", id="on one GPU, by shared memory"),
        pytest.param(1, "broadcast", "broadcast by CUDA IPC", id="on one GPU, by CUDA IPC"),
        pytest.param(2, "broadcast", "broadcast by NCCL", id="on two GPUs, by NCCL"),
    ],
)
async def test_grpo_trains_beside_it(meshes: int, sync: str, route: str, tmp_path: Path) -> None:
    gpu = {"cpus": 0, "gpus": 1, "gib": 4}
    named = {"main": gpu} if meshes == 1 else {"main": gpu, "rollout": gpu}
    rollout_mesh = list(named)[-1]
    table = {
        **letter_b(tmp_path),
        "sampling": {"n": 4, "max_tokens": 4},
        "prompts": 4,
        "steps": 2,
        "policy": {"model": WIDER, "backend": "fsdp", "dtype": "bfloat16", "weight_sync": sync},
        "sampler": {"backend": "vllm", "mesh": rollout_mesh, "slots": 64, "vllm": {**OWN, "sleep": meshes == 1}},
    }
    ran = await run_page("grpo", tmp_path / "run", table, engine="processes", meshes=named)
    log = (ran.folder / "logs" / f"{rollout_mesh}-0.log").read_text("utf-8")
    assert re.findall("weights arrive by='(.*?)'", log) == [route]
    assert [step["sampler_difference"] < 2e-2 for step in ran.steps] == [True, True]
