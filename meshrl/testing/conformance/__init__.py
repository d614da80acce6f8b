"""The conformance suite for backends that train or sample: their numbers must equal those of plain torch on any ranks.

    async with Harness(Subject("mine", {"dp": 2}, engine="ray")) as harness:
        for check in CHECKS:
            await harness.run(check)

Each check is a guarantee, which its docstring states. `Harness.run` raises `PromiseBroken`, with the numbers of both
sides, if it is broken or if the check does not end in time.
"""

from typing import Final

from meshrl.errors import BackendError

try:
    from meshrl.testing.conformance import draws, halves, interruptions, numbers, refusals, rows, state
    from meshrl.testing.conformance.subject import PLAIN, Check, Harness, Side, Subject, Trial, name_of
except ModuleNotFoundError as _missing:
    raise BackendError(
        f"meshrl.testing.conformance needs the package {_missing.name!r}, which is not installed: "
        "pip install 'meshrl[torch]'"
    ) from _missing

__all__ = [
    "ADAPTERS",
    "CHECKS",
    "CRITIC",
    "PLAIN",
    "POLICY",
    "REFERENCE",
    "REWARD_MODEL",
    "SAMPLER",
    "SAMPLER_OF_NO_MODEL",
    "Check",
    "Harness",
    "Side",
    "Subject",
    "Trial",
    "name_of",
]

POLICY: Final[tuple[Check, ...]] = (*numbers.POLICY, *halves.POLICY, *refusals.POLICY, *state.POLICY)
"""The guarantees of a policy."""

CRITIC: Final[tuple[Check, ...]] = (*numbers.CRITIC, *refusals.CRITIC, *state.CRITIC)
"""The guarantees of a critic."""

REFERENCE: Final[tuple[Check, ...]] = (*numbers.REFERENCE, *refusals.REFERENCE)
"""The guarantees of a reference."""

REWARD_MODEL: Final[tuple[Check, ...]] = (*numbers.REWARD_MODEL, *state.REWARD_MODEL, *refusals.REWARD_MODEL)
"""The guarantees of a reward model that is trained."""

CHECKS: Final[tuple[Check, ...]] = (*POLICY, *CRITIC, *REFERENCE, *state.TOGETHER)
"""The guarantees of a backend with these three roles."""

ADAPTERS: Final[tuple[Check, ...]] = numbers.ADAPTERS
"""The guarantees of a policy that trains adapters if its table has `lora`."""

SAMPLER_OF_NO_MODEL: Final[tuple[Check, ...]] = (*draws.ANY, *rows.ANY, *interruptions.ANY)
"""The guarantees of a sampler that draws from no model. Its subject sets `weights`."""

SAMPLER: Final[tuple[Check, ...]] = (*SAMPLER_OF_NO_MODEL, *draws.MODEL, *rows.MODEL, *interruptions.MODEL)
"""The guarantees of a sampler."""
