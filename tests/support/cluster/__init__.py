"""Several simulated hosts on one machine, to try a script while machines die and networks fail. See docs/hosts.md.

    sudo .venv/bin/python -m tests.support.cluster --hosts 3 meshrl run grpo/quickstart run.engine=auto

A host is a set of Linux namespaces: it has its own network, name, processes, /dev/shm, /tmp and clock.
"""

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.host import Host
from tests.support.cluster.namespaces import Inside, missing

__all__ = ["Cluster", "Host", "Inside", "missing"]
