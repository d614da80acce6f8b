"""The testing kit: roles without a model, in virtual time, under thousands of schedules. See docs/testing.md.

    meshrl run grpo/quickstart policy.backend=fake sampler.backend=fake reward.backend=fake

This runs a whole script on the backend `fake`.
"""

from meshrl.testing.clock import Deadlock, LeftRunning, VirtualLoop, simulate
from meshrl.testing.explorer import Scenario, ScheduleFailed, explore
from meshrl.testing.fakes import (
    FakeCritic,
    FakePolicy,
    FakeReference,
    FakeReward,
    FakeRewardModel,
    FakeRun,
    FakeSampler,
)
from meshrl.testing.invariant_checker import PromiseBroken, Witness
from meshrl.testing.latency import Crash, Latency, Lognormal, Recorded, crashing, delayed, per_row, per_token
from meshrl.testing.scripted import ScriptedChat, ScriptedSampler

__all__ = [
    "MODELS",
    "ROLES",
    "Crash",
    "Deadlock",
    "FakeCritic",
    "FakePolicy",
    "FakeReference",
    "FakeReward",
    "FakeRewardModel",
    "FakeRun",
    "FakeSampler",
    "Latency",
    "LeftRunning",
    "Lognormal",
    "PromiseBroken",
    "Recorded",
    "Scenario",
    "ScheduleFailed",
    "ScriptedChat",
    "ScriptedSampler",
    "VirtualLoop",
    "Witness",
    "crashing",
    "delayed",
    "explore",
    "per_row",
    "per_token",
    "simulate",
]

CHAT = "meshrl.testing.scripted:read_chat"
COUNTS = "meshrl.testing.fakes:count_rows"
MODELS = "ignored"

ROLES = {
    "Critic": "meshrl.testing:FakeCritic",
    "Policy": "meshrl.testing:FakePolicy",
    "Reference": "meshrl.testing:FakeReference",
    "Sampler": "meshrl.testing:FakeSampler",
    "Reward": "meshrl.testing:FakeReward",
    "RewardModel": "meshrl.testing:FakeRewardModel",
}
"""The roles of the backend `fake`, for the registry."""
