"""The testing kit: roles without a model, in virtual time, under thousands of schedules. See docs/testing.md.

    meshrl run grpo/quickstart policy.backend=fake sampler.backend=fake reward.backend=fake

This runs a whole script on the backend `fake`.
"""

from meshrl.testing.clock import Deadlock, LeftRunning, VirtualLoop, simulate
from meshrl.testing.critic import FakeCritic
from meshrl.testing.explorer import Scenario, ScheduleFailed, explore
from meshrl.testing.fakes import FakePolicy, FakeReference, FakeReward, FakeSampler
from meshrl.testing.faulty_files import FaultyFiles
from meshrl.testing.json_state import State, read_state
from meshrl.testing.kills import KillPoints, Remains
from meshrl.testing.latency import Crash, Latency, Lognormal, Recorded, crashing, delayed, per_row, per_token
from meshrl.testing.reward_model import FakeRewardModel
from meshrl.testing.run import FakeRun
from meshrl.testing.scripted import ScriptedChat, ScriptedSampler
from meshrl.testing.witness import PromiseBroken, Witness

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
    "FaultyFiles",
    "KillPoints",
    "Latency",
    "LeftRunning",
    "Lognormal",
    "PromiseBroken",
    "Recorded",
    "Remains",
    "Scenario",
    "ScheduleFailed",
    "ScriptedChat",
    "ScriptedSampler",
    "State",
    "VirtualLoop",
    "Witness",
    "crashing",
    "delayed",
    "explore",
    "per_row",
    "per_token",
    "read_state",
    "simulate",
]

CHAT = "meshrl.testing.scripted:read_chat"
COUNTS = "meshrl.testing.fakes:count_prompts"
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
