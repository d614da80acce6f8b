"""Ranks as processes of this machine, without Ray: the engine for one machine with several GPUs or cores.

A template process imports what ranks need, and forks them. Calls go through `engines.remote`.
"""

from meshrl.engines.processes.engine import ProcessEngine as ProcessEngine
