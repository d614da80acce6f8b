"""The network between hosts: a switch, and a cable to each host that can be unplugged or degraded."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final, cast

from meshrl.errors import ConfigError
from tests.support.cluster.namespaces import Inside, Namespace, piped

_WIRE: Final = Path(__file__).with_name("wire.py")
_MTU: Final = "mtu 9000"
_SWITCH: Final = "switch"
_NOBODY: Final = "02:00:00:00:00:01"
_QUEUED: Final = 0.02
"""Seconds that frames wait at most at a cable that only has a rate."""
_BURST: Final = 0.002
"""Length of a burst after a pause, in seconds at the rate."""


class Network:
    """A switch in a separate namespace, invisible on the machine's own network."""

    def __init__(self) -> None:
        self.switch: Namespace = Namespace("net")
        make = f"link add {_SWITCH} type bridge mcast_snooping 0"
        self.switch.do("ip", "-batch", "-", lines=[make, f"link set {_SWITCH} {_MTU} up"])
        self.has_netem: bool = self._has("netem")
        self.has_tbf: bool = self._has(*_tbf(1e9))

    def _has(self, *queue: str) -> bool:
        has = self.switch.do("tc", "qdisc", "add", "dev", _SWITCH, "root", *queue, fails=True)
        if has:
            self.switch.do("tc", "qdisc", "del", "dev", _SWITCH, "root")
        return has

    def close(self) -> None:
        self.switch.end()


class Cable:
    def __init__(self, network: Network, machine: Namespace, number: int) -> None:
        """`number`: names its devices, and is the last part of the host's address."""
        self._network = network
        self._machine = machine
        self._number = number
        self._port = self._plug = f"port{number}"
        self._wire: Inside | None = None
        self._is_held = False
        add = f"link add {self._port} {_MTU} type veth peer name eth0 {_MTU} netns {machine.pid}"
        network.switch.do("ip", "-batch", "-", lines=[add, f"link set {self._port} master {_SWITCH} up"])
        lines = ["link set lo up", "link set eth0 up", f"address add {address(number)}/24 dev eth0"]
        machine.do("ip", "-batch", "-", lines=[*lines, "route add default dev eth0"])

    def cut(self) -> None:
        """Unplug it. Whatever is sent is lost without notice."""
        self._network.switch.do("ip", "link", "set", self._plug, "nomaster")

    def lose(self, to: str) -> None:
        """Lose without notice what the host sends to an address, in frames to a device that nobody has."""
        self._machine.do("ip", "neigh", "replace", to, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def heal(self) -> None:
        """Plug it in again, in its original state."""
        self.slow()
        self._machine.do("ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
        self._network.switch.do("ip", "link", "set", self._plug, "master", _SWITCH)

    def slow(self, delay: float = 0.0, loss: float = 0.0, rate: float | None = None) -> None:
        """Degrade it in both directions. `delay`: seconds. `loss`: 0 to 1. `rate`: bits per second, None: unlimited."""
        if self._network.has_netem:
            rated = ["rate", f"{rate:.0f}"] if rate else []
            self._queue("replace", "netem", "delay", f"{delay * 1e6:.0f}us", "loss", f"{loss * 100}%", *rated)
            return
        if self._is_held:
            self._is_held = False
            self._queue("del")
        if rate and not (self._wire or delay or loss) and self._network.has_tbf:
            self._is_held = True
            self._queue("replace", *_tbf(rate))
        elif self._wire or delay or loss or rate:
            wire = self._wire = self._wire or self._wired()
            told = piped(wire.stdin)
            told.write(json.dumps({"delay": delay, "loss": loss, "rate": rate}) + "\n")
            told.flush()

    def traffic(self) -> tuple[int, int]:
        """Bytes from the host, and bytes to it."""
        counts = self._shown(self._port)["stats64"]
        return counts["rx"]["bytes"], counts["tx"]["bytes"]

    def take_away(self) -> None:
        """Remove it. The devices of a stopped host disappear by themselves."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
            self._network.switch.do("ip", "link", "del", self._inner)
        self._network.switch.do("ip", "link", "del", self._port, fails=True)

    def _queue(self, verb: str, *queue: str) -> None:
        for place, device in ((self._network.switch, self._port), (self._machine, "eth0")):
            place.do("tc", "qdisc", verb, "dev", device, "root", *queue)

    @property
    def _inner(self) -> str:
        return f"inner{self._number}"

    def _wired(self) -> Inside:
        """Connect the host's port and the switch by a wire process."""
        near, far = f"near{self._number}", f"far{self._number}"
        switch = self._network.switch
        wire = switch.start([sys.executable, "-IS", str(_WIRE), near, far], stdin=PIPE, stdout=PIPE, stderr=PIPE)
        if piped(wire.stdout).readline() != "ready\n":
            said = wire.communicate()[1].strip()
            raise ConfigError(f"the kernel has neither netem nor tap devices, so no cable is slow here: {said}")
        lines = [
            f"link add {self._inner} {_MTU} type bridge mcast_snooping 0",
            f"link set {self._inner} up",
            f"link set {near} {_MTU} master {self._inner} up",
            f"link set {self._port} master {self._inner}",
            f"link set {far} {_MTU} up",
            *([f"link set {far} master {_SWITCH}"] if self._is_plugged_in() else []),
        ]
        switch.do("ip", "-batch", "-", lines=lines)
        self._plug = far
        return wire

    def _is_plugged_in(self) -> bool:
        return "master" in self._shown(self._plug)

    def _shown(self, device: str) -> dict[str, Any]:
        command = [*self._network.switch.enter("net"), "ip", "-json", "-stats", "link", "show", device]
        shown = subprocess.run(command, stdout=PIPE, text=True, check=True)
        return cast("list[dict[str, Any]]", json.loads(shown.stdout))[0]


def address(number: int) -> str:
    return f"10.77.0.{number}"


def _tbf(rate: float) -> list[str]:
    """A kernel queue that limits the rate, in bits per second."""
    burst = max(rate / 8 * _BURST, 2 * 9000)
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst:.0f}b", "latency", f"{_QUEUED * 1e3:.0f}ms"]
