"""Ranks as processes of this machine, without Ray: the engine of one machine with several GPUs or cores.

A template process, started once, imports what ranks need and forks them; calls go through `engines.transport`.
"""

from meshrl.engines.processes.engine import ProcessEngine

__all__ = ["ProcessEngine"]
