"""Repeat what a server's journals recorded, and compare each result with the one that was recorded, bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from meshrl.errors import DataError, MeshrlError, described
from meshrl.remote import Call
from meshrl.roles import Policy, Sampler
from meshrl.run import Run, is_machine_fault
from meshrl.tinker.config import ServedConfig
from meshrl.tinker.journal import Answered, Asked, Journal, packed, records_in
from meshrl.tinker.models import models_of, tables_of
from meshrl.tinker.queues import ModelQueue, Room
from meshrl.tinker.requests import Load, OptimStep, Pass, Request
from meshrl.tinker.results import Failure, Result
from meshrl.tinker.service import Service


@dataclass(frozen=True)
class Replayed:
    """What became of one model's requests."""

    tenant: str
    model: str
    compared: int
    """Requests that were applied again."""
    differences: Sequence[str]
    """Those with another result, one sentence each."""


async def replay(config: ServedConfig) -> list[Replayed]:
    """Apply all requests of all models in `tinker.folder` again, each model from its beginning. End the server first.

    Samples are in no journal, and saved weights are not compared. DataError if a journal has lost its beginning, which
    `tinker.record` keeps.
    """
    run_config = config.run.model_copy(update={"name": f"{config.run.name}-replay"})
    with TemporaryDirectory(prefix="meshrl-") as scratch:
        async with Run(run_config) as run:
            tables, sampler_table = tables_of(config)
            policy, sampler = await run.spawn(Policy, tables.policy), await run.spawn(Sampler, sampler_table)
            models = await models_of(policy, sampler, config, Path(scratch, "initial"))
            service = Service(config, models, Path(config.tinker.folder), Room(1, 1, lambda _: 1))
            return [
                await _model(service, tenant, model.id, Path(scratch))
                for tenant in service.library.tenants()
                for model in reversed(service.library.shelf(tenant).models())
            ]


async def _model(service: Service, tenant: str, model: str, scratch: Path) -> Replayed:
    asked, recorded = _recorded(service.library.shelf(tenant).model_folder(model))
    if asked and min(asked) > 0:
        raise DataError(
            f"the journal of {model} begins with request {min(asked)}: what came before was removed when a state was "
            "written. Set tinker.record = true before a session that is to be replayed"
        )
    queue = ModelQueue(model, tenant, Journal(scratch), Room(1, 1, lambda _: 1))
    await service.models.create(service.model(tenant, model))
    compared, differences = 0, list[str]()
    for number in sorted(asked.keys() & recorded.keys()):
        request, before = asked[number], recorded[number]
        if isinstance(before, Failure) or not _is_repeated(request):
            continue
        compared += 1
        try:
            now = await service.repeated(queue, request)
        except (MeshrlError, OSError) as error:
            if is_machine_fault(error):
                raise
            differences.append(f"request {number} of {model} fails now: {described(error)}")
            break
        if packed(Answered(number, now)) != packed(Answered(number, before)):
            differences.append(f"request {number} of {model} has another result")
    await service.models.drop(model)
    queue.journal.close()
    return Replayed(tenant, model, compared, differences)


def _recorded(folder: Path) -> tuple[Mapping[int, Request], Mapping[int, Result]]:
    asked: dict[int, Request] = {}
    recorded: dict[int, Result] = {}
    for record, _ in records_in(folder):
        if isinstance(record, Asked):
            asked[record.number] = record.request
        else:
            recorded[record.number] = record.result
    return asked, recorded


def _is_repeated(request: Request) -> bool:
    """True for what computes: saved weights are at other places."""
    return isinstance(request, Pass | OptimStep | Load) or (isinstance(request, Call) and request.verb != "weights")
