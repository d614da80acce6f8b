"""Versions of nodes against the controller's: what is compared, and what is told of a difference."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from meshrl import Mesh, Resources
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.code import Versions, installed, table
from meshrl.errors import ConfigError
from meshrl.roles import packages_of

HERE = {"Python": "3.11.7", "meshrl": "0.1.0", "torch": "2.13.0"}


def test_the_table_names_each_node_package_and_both_versions() -> None:
    others = {
        "10.0.0.2": {**HERE, "torch": "2.12.1"},
        "10.0.0.13": {**HERE, "Python": "3.11.9", "torch": "not installed", "meshrl": "not installed"},
    }
    first, *rows, remedy = table(HERE, others).splitlines()
    assert first.startswith("2 nodes have other versions")
    assert rows == [
        "  node       package  here    there",
        "  10.0.0.2   torch    2.13.0  2.12.1",
        "  10.0.0.13  Python   3.11.7  3.11.9",
        "  10.0.0.13  meshrl   0.1.0   not installed",
    ]
    assert remedy.startswith("install Python==3.11.7 and meshrl==0.1.0 and torch==2.13.0 on each, as `pip install ")


def test_a_build_is_not_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller without a GPU has torch for CPUs."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu" if name == "torch" else "1.0")
    assert installed(["torch", "other"])["torch"] == "2.13.0"


async def test_a_node_that_is_slow_to_answer_is_asked_again_when_it_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    async def ask(_: Versions, node: str) -> dict[str, str]:
        asked.append(node)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return {**installed(["meshrl", "torch"]), "torch": "1.2.3"}

    monkeypatch.setattr(Versions, "_ask", ask)
    versions = Versions(["no-such-package"], 0.001)  # which is not asked of a node
    assert not await versions.check({"n1": "10.0.0.2"})
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 +torch"):
        await versions.check({"n1": "10.0.0.2"}, have_ranks=True)


async def test_no_rank_runs_on_a_node_that_does_not_tell_its_versions(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Versions, "_ask", AsyncMock(return_value=None))
    with pytest.raises(ConfigError, match=r"did not start on the cluster: its node .* did not report the versions"):
        await Mesh.reserve(engine, 1, Resources(cpus=0))


def test_the_packages_of_a_backend_are_those_of_its_extra_and_what_that_asks_for() -> None:
    assert packages_of("vllm") == {"meshrl", "vllm"}
    assert {"meshrl", "megatron-core", "torch", "transformers"} <= packages_of("megatron")
    assert packages_of("sim") == {"meshrl"}
    assert packages_of("no-such-backend") == frozenset()
