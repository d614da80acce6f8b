"""The testing kit: roles without a model, in virtual time, under thousands of schedules. See docs/testing.md.

    meshrl run grpo/quickstart policy.backend=fake sampler.backend=fake reward.backend=fake

This runs a whole script on the backend `fake`.
"""

from meshrl.testing.clock import (
    Deadlock as Deadlock,
    LeftRunning as LeftRunning,
    VirtualLoop as VirtualLoop,
    simulate as simulate,
)
from meshrl.testing.explorer import Scenario as Scenario, ScheduleFailed as ScheduleFailed, explore as explore
from meshrl.testing.fakes import (
    FakeCritic as FakeCritic,
    FakePolicy as FakePolicy,
    FakeReference as FakeReference,
    FakeReward as FakeReward,
    FakeRewardModel as FakeRewardModel,
    FakeRun as FakeRun,
    FakeSampler as FakeSampler,
)
from meshrl.testing.invariant_checker import PromiseBroken as PromiseBroken, Witness as Witness
from meshrl.testing.latency import (
    Crash as Crash,
    Latency as Latency,
    Lognormal as Lognormal,
    Recorded as Recorded,
    crashing as crashing,
    delayed as delayed,
    per_row as per_row,
    per_token as per_token,
)
from meshrl.testing.scripted import ScriptedChat as ScriptedChat, ScriptedSampler as ScriptedSampler

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
