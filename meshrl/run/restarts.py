"""Restart a job's run after a machine has failed, up to `run.restarts` times."""

import gc
from collections.abc import Callable
from pathlib import Path

from meshrl import log
from meshrl.errors import DataLost, EngineDied, MeshrlError, RankDied, described
from meshrl.events import Restart, sink
from meshrl.run.config import RunConfig
from meshrl.run.jobs import Job
from meshrl.run.run import Run


async def run_job(job: Job[RunConfig], begun: Callable[[Run], None] = lambda _: None) -> Run:
    """Run a job's script to its end, and return the ended run.

    While `restarts` are left, a machine's fault does not end the job: the script is called again, with new ranks and
    roles, in a run that resumes from the newest checkpoint. Any other error is raised. `begun` gets each run as it
    begins.
    """
    config, number, fault = job.run, 0, ""
    while True:
        run = Run(config, job.resolved)
        try:
            async with run:
                if number:
                    run.waits = config.restart_wait
                    _note(run, number, fault)
                begun(run)
                await job.script.function(run, job.config)
            return run
        except (MeshrlError, ExceptionGroup) as error:
            if number == config.restarts or not is_fault_of_a_machine(error):
                raise
            number, fault = number + 1, described(error)
        log.warning(
            f"a machine failed: the run is restarted, number {number} of {config.restarts} (run.restarts)",
            error=fault,
        )
        if _has_its_folder(run):  # else only an earlier run's could be resumed
            config = config.model_copy(update={"resume": True})
        del run
        gc.collect()  # the error and its frames form a cycle, and hold weights in shared memory


def is_fault_of_a_machine(error: BaseException) -> bool:
    """True if a rank's process, its data or its device is lost. A new attempt may not meet the same fault."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_fault_of_a_machine, error.exceptions))
    if isinstance(error, RankDied | EngineDied | DataLost):
        return True
    cause = error.__cause__
    return isinstance(error, MeshrlError) and cause is not None and is_fault_of_a_machine(cause)


def _note(run: Run, number: int, fault: str) -> None:
    run.summary(restarts=number)
    if to := sink.get():
        to.emit(Restart(to.now(), number, fault))


def _has_its_folder(run: Run) -> bool:
    return run.recorder.folder == Path(run.config.folder) / run.config.name
