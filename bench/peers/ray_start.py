"""Start bare Ray up to its first answer: a cluster, two actors, one call. Timed by bench/calls.py --engine ray."""

import logging
import os

import ray


class Idle:
    """Does nothing."""

    async def nothing(self):
        """No argument, no result."""


# As the Ray engine does.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray.init("local", num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False, logging_level=logging.ERROR)
made = ray.remote(num_cpus=1)(Idle)
ray.get([actor.nothing.remote() for actor in (made.remote(), made.remote())])
print('{"answered": true}', flush=True)
ray.shutdown()
