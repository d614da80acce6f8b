"""What holds for every test."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import settings

from meshrl.mesh import current_rank, rank_context

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from meshrl.testing.conformance import Harness, Subject

# How long one example takes says more of the machine's load than of the code; each test has a time limit as a whole.
settings.register_profile("meshrl", deadline=None)
settings.load_profile("meshrl")


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

    from meshrl_hf.text import character_tokenizer  # noqa: PLC0415

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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harness_of(request: pytest.FixtureRequest) -> "AsyncGenerator[Callable[[Subject], Awaitable[Harness]]]":
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
                if subject.engine == "ray":
                    request.getfixturevalue("ray_cluster")
                held.append(await stack.enter_async_context(Harness(subject)))
            return held[0]

        yield of


@pytest_asyncio.fixture(loop_scope="module")
async def harness(request: pytest.FixtureRequest, harness_of: "Callable[[Subject], Awaitable[Harness]]") -> "Harness":
    """The harness of the subject that is the test's parameter."""
    return await harness_of(request.param)
