"""The testing kit: roles without a model, so that an algorithm is tested in milliseconds on any machine.

meshrl run grpo/quickstart policy.backend=fake sampler.backend=fake reward.backend=fake
"""

from meshrl.testing.critic import FakeCritic
from meshrl.testing.fakes import FakePolicy, FakeReference, FakeReward, FakeSampler

__all__ = ["ROLES", "FakeCritic", "FakePolicy", "FakeReference", "FakeReward", "FakeSampler"]

ROLES = {
    "Critic": "meshrl.testing:FakeCritic",
    "Policy": "meshrl.testing:FakePolicy",
    "Reference": "meshrl.testing:FakeReference",
    "Sampler": "meshrl.testing:FakeSampler",
    "Reward": "meshrl.testing:FakeReward",
}
"""What the backend `fake` offers to the registry."""
