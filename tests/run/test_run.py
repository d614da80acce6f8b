"""Roles of a run on one mesh, each with axes of its own, and what they hand on."""

from pathlib import Path

import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import ConfigError, DataError, RankFailed
from meshrl.run import MeshConfig


def config(folder: Path) -> rl.RunConfig:
    return rl.RunConfig(folder=str(folder), meshes={"main": MeshConfig(ranks=4, cpus=0, axes={"dp": 4})})


def test_meshes_that_would_wait_for_each_other_in_one_process_have_several() -> None:
    table: list[tuple[dict[str, dict[str, object]], str]] = [
        ({}, "local"),
        ({"main": {"ranks": 4}}, "local"),
        ({"main": {"gpus": 1}}, "processes"),
        ({"main": {}, "sampler": {}}, "processes"),
    ]
    for meshes, engine in table:
        assert rl.RunConfig.model_validate({"meshes": meshes}).engine == engine, meshes
        assert rl.RunConfig.model_validate({"meshes": meshes, "engine": "ray"}).engine == "ray"


async def test_roles_see_the_ranks_of_one_mesh_as_different_axes_and_hand_weights_on(tmp_path: Path) -> None:
    async with rl.Run(config(tmp_path)) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none", axes={"dp": 2, "tp": 2}))
        critic = await run.spawn(rl.Critic, rl.CriticConfig(backend="fake", model="none", axes={"pp": 2, "dp": 2}))
        reference = await run.spawn(rl.Reference, rl.ReferenceConfig(backend="fake", model="none"))
        assert isinstance(policy, rl.Policy)
        assert [rank.axes for rank in rl.ranks(policy)] == [{"dp": dp, "tp": tp} for dp in range(2) for tp in range(2)]
        assert [rank.axes for rank in rl.ranks(critic)] == [{"pp": pp, "dp": dp} for pp in range(2) for dp in range(2)]
        assert [rank.axes for rank in rl.ranks(reference)] == [{"dp": dp} for dp in range(4)]
        await reference.load(await policy.weights())
        with pytest.raises(RankFailed, match=r"version 3 are of another model: .* and these have strange"):
            await reference.load(rl.Weights(3, {"strange": np.zeros(1)}))


async def test_axes_that_do_not_fit_are_told_before_ranks_are_reserved(tmp_path: Path) -> None:
    aside = rl.SamplerConfig(backend="fake", model="none", mesh="aside", axes={"dp": 2})
    async with rl.Run(config(tmp_path)) as run:
        with pytest.raises(ConfigError, match=r"the mesh 'aside' has ranks = 1: .* or set run\.meshes\.aside\.ranks"):
            await run.spawn(rl.Sampler, aside)


async def test_a_loop_has_no_fewer_than_no_steps(tmp_path: Path) -> None:
    async with rl.Run(config(tmp_path)) as run:
        assert [step async for step in run.steps(0)] == []
        with pytest.raises(DataError, match=r"run\.steps\(-1\): the number of steps must be at least 0"):
            run.steps(-1)
