"""`python -m tests.support.cluster --hosts 3 COMMAND`: run a command on the first of several hosts."""

import argparse
import signal
import sys
from functools import partial

from meshrl.errors import ConfigError
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.namespaces import Inside


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--cores", type=int, default=2, help="cores of each host, as Ray counts them (2)")
    parser.add_argument(
        "--delay", type=float, default=0.0, help="seconds that a packet takes from a host to the switch"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="part of the packets that is lost there, 0 to 1")
    parser.add_argument("--rate", type=float, help="bits a second of each host's cable")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what runs on the first host")
    told = parser.parse_args()
    if not told.command:
        parser.error("give the command that is to run on the first host")
    try:
        with Cluster(told.hosts, cores=told.cores) as cluster:
            for host in cluster.hosts:
                host.slow(delay=told.delay, loss=told.loss, rate=told.rate)
            sys.exit(_ended(cluster.hosts[0].start(told.command)))
    except ConfigError as error:
        sys.exit(f"error: {error}")


def _ended(process: Inside) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, partial(_hand_on, process))
    return process.wait()


def _hand_on(process: Inside, number: int, _: object) -> None:
    process.send_signal(number)


if __name__ == "__main__":
    main()
