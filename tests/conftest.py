import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import structlog
from hypothesis import settings

from meshrl import Actor, Mesh, Resources, stop
from meshrl.engines import make_engine
from meshrl.errors import MeshrlError
from meshrl.mesh import Engine, current_rank, rank_context
from tests.support import warm as warm_process

if TYPE_CHECKING:
    from playwright.async_api import Browser
    from transformers import PretrainedConfig

    from meshrl.testing.conformance import Harness, Subject

# What is not there is not looked for elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"

# Ray's workers would be the last to get a busy processor, after all other tests.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 -- the name that Ray reads

# Torch asks for the name of each peer of a store: a nameserver that does not answer is waited for no longer than this.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# Engines of processes import torch and the backends once a session.
warm_process.install()

# A shell ignores Ctrl+C for what it runs in the background, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says more of the machine's load than of the code; each test has a time limit as a whole.
# The examples are the same each time, so that a change is not refused for what another one broke.
settings.register_profile("meshrl", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("meshrl")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, and give what asks for a cluster, by a fixture or as its engine, to one worker.

    So one cluster is started, and its processes import torch once. These tests come first, then files that have others
    that start processes, or slow ones: so no worker is left alone with a long one at the end.
    """
    cluster: set[pytest.Item] = set()
    for item in items:
        drawn = getattr(item, "callspec", None)
        engine = drawn.params.get("engine") if drawn else None
        if engine == "processes":
            item.add_marker(pytest.mark.process)
        if "ray_cluster" in getattr(item, "fixturenames", ()) or engine == "ray":
            item.add_marker(pytest.mark.process)
            item.add_marker(pytest.mark.xdist_group("cluster"))
            cluster.add(item)
        if item.config.getoption("loadgroup", default=False) and hasattr(item, "id"):
            # pytest-xdist 3.8 writes the groups into `item._nodeid`, which pytest 9.2 no longer reads.
            groups = {mark.args[0] for mark in item.iter_markers("xdist_group")}
            item._id = item.id.parse("@".join([item.nodeid, *sorted(groups)[:1]]))
    long = {item.path for item in items if any(map(item.get_closest_marker, ("process", "slow")))}
    items.sort(key=lambda item: (item not in cluster, item.path not in long))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Log lines are as they were, though structlog's `capture_logs` leaves a configuration where there was none."""
    configured = structlog.is_configured()
    yield
    if not configured:
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _own_rank() -> Iterator[None]:
    """The rank that a test says it runs on is no other test's."""
    token = rank_context.set(current_rank())
    yield
    rank_context.reset(token)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster of this machine for all tests: starting one takes seconds."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    import ray  # noqa: PLC0415 -- an extra, and slow to import

    ray.init("local", num_cpus=2, resources={"shelf": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def random_model() -> Callable[..., str]:
    """`random_model(config, folder)`: a model of 11 tokens whose every parameter is random, norms and biases too.

    It is that of a causal language model, or of another `auto` class; with `noise = 0` it is as it is initialised.
    Returns the folder, which has a tokenizer as well.
    """
    import torch  # noqa: PLC0415 -- slow to import, as the others are
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from meshrl_torch.model.text import character_tokenizer  # noqa: PLC0415

    def save(config: "PretrainedConfig", folder: Path, auto: Any = AutoModelForCausalLM, noise: float = 0.2) -> str:
        torch.manual_seed(0)
        network = auto.from_config(config)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        network.save_pretrained(folder)
        character_tokenizer("abcdefgh>", 48).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
async def browser() -> "AsyncGenerator[Browser]":
    """The chromium of this machine. Without it, or without playwright, a test is skipped."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright drives the browser")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH")
    async with playwright.async_playwright() as driver:
        launched = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        await launched.close()


class Warm:
    """Ranks in processes, forked from one that has imported what they need and lives as long as the session."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._meshes: dict[int, Mesh] = {}

    async def ranks(self, count: int) -> Mesh:
        """So many ranks; others than before where those died, or hang."""
        if count in self._meshes:
            with suppress(TimeoutError, MeshrlError):
                async with asyncio.timeout(60):
                    await stop(await self._meshes[count].spawn(Answers))
                return self._meshes[count]
            await self._meshes.pop(count).stop()
        if self._engine is None:
            modules = (
                "transformers",
                "meshrl_torch.train.one_rank",
                "meshrl_torch.train.fsdp.roles",
                "meshrl_megatron.roles",
            )
            self._engine = make_engine("processes", modules=modules)
        self._meshes[count] = await Mesh.reserve(self._engine, count, Resources(cpus=0))
        return self._meshes[count]

    async def rest(self) -> None:
        """End the ranks: each wakes a hundred times a second for each of its groups, also when nobody asks it."""
        for mesh in self._meshes.values():
            await mesh.stop()
        self._meshes.clear()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class Answers(Actor):
    """Made and stopped, which shows that a rank answers."""


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def warm_engine() -> AsyncGenerator[Warm]:
    made = Warm()
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def warm(warm_engine: Warm) -> AsyncGenerator[Callable[[int], Awaitable[Mesh]]]:
    """`await warm(2)`: ranks in processes for tests that leave them as they were and run in the loop of the session."""
    yield warm_engine.ranks
    await warm_engine.rest()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def harness_of(
    warm: Callable[[int], Awaitable[Mesh]],
) -> "AsyncGenerator[Callable[[Subject], Awaitable[Harness]]]":
    """The harness of a subject. Tests that ask for the same one after another share it, and the processes it starts.

    Not a fixture with parameters of its own: beside others that change, pytest makes such a one anew for each test.
    """
    from meshrl.testing.conformance import Harness  # noqa: PLC0415 -- most tests do without

    held: list[Harness] = []
    async with AsyncExitStack() as stack:

        async def of(subject: "Subject") -> Harness:
            if [harness.subject for harness in held] != [subject]:
                held.clear()
                await stack.aclose()
                ranks = warm if subject.engine == "processes" else None
                held.append(await stack.enter_async_context(Harness(subject, ranks)))
            return held[0]

        yield of


@pytest_asyncio.fixture(loop_scope="session")
async def harness(request: pytest.FixtureRequest, harness_of: "Callable[[Subject], Awaitable[Harness]]") -> "Harness":
    return await harness_of(request.param)
