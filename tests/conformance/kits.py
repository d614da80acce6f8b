"""Checks of the conformance suite, several in one test, which tells all that are broken; and one more of them."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import TypeAlias

import pytest
import torch
from transformers import AutoModelForCausalLM

import meshrl_torch
from meshrl.errors import MeshrlError
from meshrl.roles import registry
from meshrl.testing import PromiseBroken
from meshrl.testing.conformance import Check, Harness, Subject, Trial, name_of
from meshrl.testing.conformance.compare import close
from tests.backends.material import by_row

Bugs: TypeAlias = Mapping[str, Sequence[type]]


async def keep(harness: Harness, checks: Iterable[Check], model: str | None = None) -> None:
    broken: list[Exception] = []
    for check in checks:
        try:
            await harness.run(check, model)
        except (AssertionError, MeshrlError) as error:
            error.add_note(f"in {name_of(check)} of {harness.subject}")
            broken.append(error)
    if broken:
        raise ExceptionGroup(f"{harness.subject} breaks {len(broken)} of its promises", broken)


def asked(subject: Subject, checks: Sequence[Check], every: Sequence[Check] = (), model: str = "small") -> list[object]:
    """A test of these checks, and one that is wide of all others of `every`. Tests of one subject follow each other."""
    ranks = [pytest.mark.process, pytest.mark.xdist_group("warm")] * (subject.engine == "processes")
    others = [check for check in every if check not in checks]
    made = [pytest.param(subject, model, checks, id=f"{subject}-{model}", marks=ranks)] if checks else []
    if others:
        marks = [*ranks, pytest.mark.wide, pytest.mark.slow]
        made.append(pytest.param(subject, model, others, id=f"{subject}-{model}-others", marks=marks))
    return list(made)


async def log_probs_of_transformers(trial: Trial) -> None:
    """`logprobs` are what transformers computes, one row at a time."""
    (batch,) = await trial.batches(1)
    scored = await (await (await trial.own.policy()).logprobs(batch)).load()
    network = AutoModelForCausalLM.from_pretrained(trial.model.folder)
    temperatures = batch.row("temperature").tolist()
    with torch.no_grad():
        rows = [by_row(network, batch.select([row]), each)[0] for row, each in enumerate(temperatures)]
    close("log-probs", scored.ragged("logprobs").values, torch.cat(rows).numpy(), trial.tolerance)


async def missed(
    bugs: Bugs, kit: Sequence[Check], plant: pytest.MonkeyPatch, waits: type, shared: bool = False
) -> list[str]:
    """Those of the bugs that the check of this name does not tell: of the class `waits` by its hanging.

    `shared`: one harness for all, so that models are made once. It may keep the numbers of a policy, not of a sampler.
    """
    checks = {name_of(check): check for check in kit}
    found: list[str] = []
    harnesses: dict[float, Harness] = {}
    async with AsyncExitStack() as stack:
        for name, bug in [(name, bug) for name, several in bugs.items() for bug in several]:
            subject = Subject(planted(plant, bug), seconds=1 if bug is waits else 600)
            if not shared or subject.seconds not in harnesses:
                harnesses[subject.seconds] = await stack.enter_async_context(Harness(subject))
            try:
                await harnesses[subject.seconds].run(checks[name])
                told = "nothing"
            except PromiseBroken as broken:
                told = "a hang" if "it hangs" in str(broken) else "a broken promise"
            expected = "a hang" if bug is waits else "a broken promise"
            if told != expected:
                found.append(f"{bug.__name__}: {name} tells {told}, not {expected}")
    return found


def planted(plant: pytest.MonkeyPatch, bug: type) -> str:
    module = ModuleType("planted")
    roles = ("Policy", "Critic", "Reference")
    torch_roles = {role: meshrl_torch.ROLES[role] for role in roles}
    (own,) = [role for role in (*roles, "Sampler") if f"Torch{role}" in {base.__name__ for base in bug.__mro__}]
    others = {} if own == "Sampler" else torch_roles
    vars(module).update(ROLES={**others, own: "planted:Planted"}, Planted=bug)
    plant.setitem(sys.modules, "planted", module)
    plant.setattr(registry, "backends", lambda: {"torch": "meshrl_torch", "planted": "planted"})
    return "planted"
