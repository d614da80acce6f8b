"""The time of a simulated rank, which concurrent jobs share."""

import asyncio
import heapq
import itertools


class Job:
    """Work of a rank."""

    def __init__(self, seconds: float, ends: float) -> None:
        self.seconds = seconds
        self.ends = ends
        """End of the job, on the clock of the processor's service."""
        self.left: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Set at the end to the share of work left undone: 0 unless it was stopped."""


class Processor:
    """A rank's time, which concurrent jobs share equally: each of k runs at 1/k of the speed."""

    def __init__(self) -> None:
        self._jobs: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._served = 0.0
        """Seconds of service that a job present from the start would have got."""
        self._seen = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> Job:
        """Begin a job that takes `seconds` alone."""
        self._go_on()
        job = Job(seconds, self._served + seconds)
        heapq.heappush(self._jobs, (job.ends, next(self._numbers), job))
        self._arm()
        return job

    def stop(self, job: Job) -> None:
        """Stop a job and leave the rest undone. Does nothing if it has ended."""
        if job.left.done():
            return
        self._go_on()
        self._jobs = [each for each in self._jobs if each[-1] is not job]
        heapq.heapify(self._jobs)
        job.left.set_result(max(0.0, job.ends - self._served) / job.seconds)
        self._arm()

    async def work(self, seconds: float) -> None:
        """Run a job to its end."""
        if seconds <= 0:
            return
        job = self.start(seconds)
        try:
            await job.left
        finally:
            self.stop(job)

    def _go_on(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._jobs:
            self._served += (now - self._seen) / len(self._jobs)
        self._seen = now

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            due = self._seen + max(0.0, self._jobs[0][0] - self._served) * len(self._jobs)
            self._timer = asyncio.get_running_loop().call_at(due, self._end)

    def _end(self) -> None:
        self._go_on()
        self._served = max(self._served, self._jobs[0][0])  # the job is due, despite rounding
        while self._jobs and self._jobs[0][0] <= self._served:
            job = heapq.heappop(self._jobs)[-1]
            if not job.left.done():
                job.left.set_result(0.0)
        self._arm()
