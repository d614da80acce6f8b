"""`python -m meshrl.testing.cluster --hosts 3 COMMAND`: run a command on the first of several hosts."""

import argparse
import signal
import sys
from functools import partial

from meshrl.errors import ConfigError
from meshrl.testing.cluster.cluster import Cluster
from meshrl.testing.cluster.namespaces import Inside


def main() -> None:
    """Make the hosts, run the command, and exit with its status."""
    parser = argparse.ArgumentParser(prog="python -m meshrl.testing.cluster", description=__doc__)
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
    """Pass signals on, wait for the end, and return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, partial(_hand_on, process))
    return process.wait()


def _hand_on(process: Inside, number: int, _: object) -> None:
    process.send_signal(number)


if __name__ == "__main__":
    main()
