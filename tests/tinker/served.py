"""A server of a small model in a thread of this process, for the SDK's clients, whose loops are threads too."""

import asyncio
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker

from meshrl.engines.local import RankLoop
from meshrl.tinker import ServedConfig, serving

KEY = "tml-first"


def table(model: str, folder: Path, **tinker: Any) -> dict[str, Any]:
    """A configuration that trains all weights of a model, and keeps everything below a folder."""
    return {
        "policy": {"model": model, "optimizer": {"max_grad_norm": None}},
        "sampler": {"model": model},
        "tinker": {"port": 0, "folder": str(folder / "state"), "model": "tiny", **tinker},
        "run": {"name": "tinker", "folder": str(folder / "runs")},
    }


@contextmanager
def served(config: Mapping[str, Any]) -> Generator[str]:
    """Serve in a thread during the block. Yields the base URL. What ended the server is raised at the end."""
    checked, started = ServedConfig.model_validate(config), threading.Event()
    found: list[str] = []
    failures: list[BaseException] = []
    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        stopping.append((asyncio.get_running_loop(), stop))
        async with serving(checked) as (url, work):
            found.append(url)
            started.set()
            waiting = asyncio.create_task(stop.wait())
            await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if work.done():
                await work

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=RankLoop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 -- raised below, in the test's thread
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        if found:
            yield found[0]
    finally:
        for loop, stop in stopping:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
        thread.join()
        if failures:
            raise failures[0]


def client(url: str, key: str = KEY) -> tinker.ServiceClient:
    """A client of the SDK."""
    return tinker.ServiceClient(base_url=url, api_key=key)


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    """A row that predicts each next token. Other inputs of the loss are lists with a number for each."""
    targets = inputs.pop("target_tokens", tokens[1:])
    return tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets, **inputs})
