"""Checks of checkpoints: a restored role continues as if nothing had happened, bit for bit."""

import os
import signal
from typing import Final

from meshrl.algo import Gae, ValueLoss
from meshrl.data import Batch
from meshrl.errors import MeshrlError, RankDied
from meshrl.mesh import Actor, at, endpoint, ranks, respawn
from meshrl.roles import Critic, Policy
from meshrl.testing.conformance.compare import loaded, refused, require
from meshrl.testing.conformance.material import LOSS, with_returns
from meshrl.testing.conformance.subject import OPTIMIZER, Check, Trial

_SCHEDULED: Final = OPTIMIZER.model_copy(update={"schedule": "cosine", "total_steps": 6})


async def a_policy_goes_on(trial: Trial) -> None:
    """A restored policy continues bit for bit: weights, version, moments and learning rate. So does one in use."""
    first, second, *rest = await trial.batches(4)
    policy = await trial.own.policy(optimizer=_SCHEDULED)
    for batch in (first, second):
        await policy.update(batch, LOSS)
    folder = str(trial.folder / "state")
    await policy.checkpoint(folder)
    kept = await loaded(policy)
    expected = [await _goes_on(policy, batch) for batch in rest]
    fresh, used = [await trial.own.policy(optimizer=_SCHEDULED) for _ in range(2)]
    await used.update(rest[1], LOSS)
    for which, again in (("fresh", fresh), ("used", used)):
        await again.restore(folder)
        require(await loaded(again) == kept, f"a {which} policy that is restored has not the weights of the checkpoint")
        found = [await _goes_on(again, batch) for batch in rest]
        require(found == expected, f"a restored {which} policy continues with {found}, not with {expected}")


async def a_critic_goes_on(trial: Trial) -> None:
    """A restored critic continues bit for bit. A policy refuses its checkpoint, and is unchanged."""
    first, second, third = [with_returns(batch, seed) for seed, batch in enumerate(await trial.batches())]
    critic = await trial.own.critic(optimizer=_SCHEDULED)
    for batch in (first, second):
        await critic.update(batch, ValueLoss())
    folder = str(trial.folder / "state")
    await critic.checkpoint(folder)
    expected = await _values_on(critic, third)
    again = await trial.own.critic(optimizer=_SCHEDULED)
    await again.restore(folder)
    found = await _values_on(again, third)
    require(found == expected, "a restored critic continues with other values or metrics than one that was not")
    policy = await trial.own.policy()
    await refused("the checkpoint of a critic", policy.restore(folder), MeshrlError, folder)
    await trial.standard(policy)


async def a_policy_made_again(trial: Trial) -> None:
    """A policy that was respawned and restored continues bit for bit.

    If ranks are processes, one of them was killed before.
    """
    one, other = await trial.batches(2)
    policy = await trial.own.policy()
    await policy.update(one, LOSS)
    folder = str(trial.folder / "state")
    await policy.checkpoint(folder)
    expected = await _goes_on(policy, other)
    if trial.harness.subject.engine != "local":
        killer = await trial.own.spawn(_Killer)
        await refused("being killed", at(killer, **ranks(killer)[-1].axes).kill(), RankDied)
        await refused("an update after a death", policy.update(other, LOSS), RankDied)
    await respawn(policy)
    version = (await loaded(policy)).version
    require(version == 0, f"a policy that is made again is at version {version}, and has made no update")
    await policy.restore(folder)
    found = await _goes_on(policy, other)
    require(found == expected, f"a policy that is made again and restored continues with {found}, not with {expected}")


class _Killer(Actor):
    @endpoint
    async def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def _goes_on(policy: Policy, batch: Batch) -> tuple[dict[str, float], int, str]:
    """An update's metrics, and the version and the fingerprint after it."""
    metrics = await policy.update(batch, LOSS)
    weights = await loaded(policy)
    return metrics.means(), weights.version, weights.fingerprint()


async def _values_on(critic: Critic, batch: Batch) -> tuple[dict[str, float], bytes]:
    """An update's metrics, and the values after it."""
    metrics = await critic.update(batch, ValueLoss())
    valued = await (await critic.advantages(batch, Gae())).load("values")
    return metrics.means(), valued.ragged("values").values.tobytes()


POLICY: Final[tuple[Check, ...]] = (a_policy_goes_on, a_policy_made_again)
"""Checks of a policy's checkpoints."""

CRITIC: Final[tuple[Check, ...]] = (a_critic_goes_on,)
"""Checks of a critic's checkpoints."""
