"""Ray on hosts that are reached by ssh: start it, use it and stop it from here."""

import base64
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from subprocess import PIPE, STDOUT
from types import TracebackType
from typing import IO, Final, NamedTuple, Self, cast

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.run.launch.needs import Need, check_fits, enough_nodes, filled

SSH: Final = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=30 -o ServerAliveCountMax=4"
"""The connection to a host that is silent for two minutes ends."""
_ANSWER: Final = 60.0
"""Seconds that a host has to describe itself, and that Ray has to start there."""
_END: Final = 60.0
"""Seconds that a run has to end, and then Ray."""
_STARTED: Final = "Ray runtime started"

_PROBE: Final = """
import importlib.util, json, os
missing = [name for name in ("meshrl", "ray") if importlib.util.find_spec(name) is None]
address, found = "", 0
if not missing:
    from meshrl.mesh import machine_gpus
    from ray.util import get_node_ip_address
    address, found = get_node_ip_address(), machine_gpus().count
print("meshrl-probe " + json.dumps([missing, address, len(os.sched_getaffinity(0)), found]))
"""


class Machine(NamedTuple):
    """A host's description of itself."""

    host: str
    address: str
    cpus: int
    gpus: int


class SshCluster:
    """Hosts with a Ray node each. The first host has the head node, and runs the script.

        with SshCluster(["one", "two"]) as cluster:
            cluster.check(needs)
            cluster.start()
            status = cluster.run(["mine.toml", "steps=20"])

    All hosts must have this Python and the current folder at the same paths. Ray starts with a new token, and ends with
    the block or with this process, however it ends.
    """

    def __init__(self, hosts: Sequence[str], ssh: str = SSH, port: int = 6379, python: str = sys.executable) -> None:
        """Ask each host for its description. Raises `ConfigError` that names all unusable hosts.

        `ssh`: a command that gets a host and a shell line. `python`: the interpreter on the hosts.
        """
        if not hosts or len(set(hosts)) < len(hosts):
            raise ConfigError(f"hosts = {', '.join(hosts) or 'none'}: name at least one host, and each only once")
        self._ssh = shlex.split(ssh)
        self._port = port
        self._python = python
        self._token = token_hex(32)
        self._nodes: list[_Node] = []
        self._run: subprocess.Popen[str] | None = None
        with ThreadPoolExecutor(len(hosts)) as asking:
            answers = list(asking.map(self._probe, hosts))
        if wrong := [each for each in answers if isinstance(each, str)]:
            raise ConfigError("\n".join([f"{len(wrong)} of {len(hosts)} hosts cannot be used:", *wrong]))
        self.machines: list[Machine] = cast("list[Machine]", answers)

    def check(self, needs: Sequence[Need]) -> None:
        """Raise `ConfigError` if the meshes do not fit on the hosts."""
        most = max(self.machines, key=lambda machine: (machine.gpus, machine.cpus))
        cpus = max(machine.cpus for machine in self.machines)
        for need in needs:
            check_fits(need, most.gpus, cpus, f"the largest host ({most.host})")
        if (requested := sum(need.gpus * need.ranks for need in needs)) > sum(each.gpus for each in self.machines):
            has = ", ".join(f"{each.host} has {each.gpus} GPU" for each in self.machines)
            raise ConfigError(
                f"the meshes ask for {requested:g} GPU in all, and {has}: ask for less, or name more hosts"
            )
        if len({(each.cpus, each.gpus) for each in self.machines}) == 1 and any(need.gpus for need in needs):
            enough_nodes(needs, len(self.machines), most.gpus, None)

    def start(self) -> None:
        """Start Ray on all hosts, on the first one first. Raises `ConfigError` with Ray's message if that fails."""
        head, *others = self.machines
        address = f"{head.address}:{self._port}"
        where = ["--head", f"--node-ip-address={head.address}", f"--port={self._port}", "--include-dashboard=false"]
        self._begin([(head, where)])
        self._begin([(machine, [f"--node-ip-address={machine.address}", f"--address={address}"]) for machine in others])
        log.info("Ray runs on the hosts", hosts=[machine.host for machine in self.machines], address=address)

    def run(self, arguments: Sequence[str]) -> int:
        """Run `meshrl run ARGUMENTS` on the first host, with this process's output. Returns the exit status."""
        head = self.machines[0]
        program = [self._python, "-c", "from meshrl.cli import main; main()", "run", *arguments]
        self._run = self._connected(head.host, [*program, f"run.engine={head.address}:{self._port}"])
        reported: set[str] = set()
        while (status := _wait(self._run, 1.0)) is None:
            for node in self._nodes:
                if node.process.poll() is not None and node.host not in reported:
                    reported.add(node.host)
                    log.warning("Ray has ended on a host", host=node.host, last=node.output()[-200:])
        return status

    def close(self) -> None:
        """Stop the run if it is still active, and then Ray on all hosts."""
        for processes in ([self._run] if self._run else [], [node.process for node in reversed(self._nodes)]):
            for process in processes:
                with suppress(OSError):
                    cast("IO[str]", process.stdin).close()
            until = time.monotonic() + _END
            for process in processes:
                if _wait(process, max(0.1, until - time.monotonic())) is None:
                    process.kill()
                    process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _probe(self, host: str) -> Machine | str:
        """A host's description, or why it cannot be used."""
        command = _line(f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([self._python, '-c', _PROBE])}")
        try:
            done = subprocess.run(  # noqa: S603 -- the user's own command
                [*self._ssh, host, command],
                stdin=subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                encoding="utf-8",
                errors="replace",
                check=False,
                timeout=_ANSWER,
            )
        except FileNotFoundError:
            return f"  {host}: there is no program {self._ssh[0]} here: give another by --ssh"
        except subprocess.TimeoutExpired:
            return f"  {host}: it did not answer within {_ANSWER:g} s"
        found = [line for line in done.stdout.splitlines() if line.startswith("meshrl-probe ")]
        if done.returncode or not found:
            reason = done.stdout.strip() or f"it ended with status {done.returncode}"
            return f"  {host}: {reason.splitlines()[-1]}"
        missing, address, cpus, gpus = json.loads(found[-1].removeprefix("meshrl-probe "))
        if missing:
            return f"  {host}: {self._python} there has no {' and no '.join(missing)}"
        return Machine(host, address, cpus, gpus)

    def _begin(self, wanted: Sequence[tuple[Machine, Sequence[str]]]) -> None:
        """Start nodes concurrently, and wait until they run."""
        ray = [self._python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        for machine, options in wanted:
            self._nodes.append(_Node(machine.host, self._connected(machine.host, [*ray, *options], output=PIPE)))
        for node in self._nodes[-len(wanted) :] if wanted else ():
            if not node.started.wait(_ANSWER) or node.process.poll() is not None:
                raise ConfigError(
                    f"Ray did not start on {node.host} within {_ANSWER:g} s:\n{node.output() or 'it said nothing'}"
                )

    def _connected(self, host: str, command: Sequence[str], output: int | None = None) -> "subprocess.Popen[str]":
        line = _line(filled("tied.sh", {"FOLDER": shlex.quote(str(Path.cwd())), "COMMAND": shlex.join(command)}))
        # In a new session, so that Ctrl-C reaches it only through this process, in order.
        process = subprocess.Popen(  # noqa: S603 -- the user's own command
            [*self._ssh, host, line],
            stdin=PIPE,
            stdout=output,
            stderr=STDOUT if output else None,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        stdin = cast("IO[str]", process.stdin)
        with suppress(BrokenPipeError):  # the reason for its end is reported where it is awaited
            stdin.write(f"{self._token}\n")
            stdin.flush()
        return process


class _Node:
    def __init__(self, host: str, process: "subprocess.Popen[str]") -> None:
        self.host = host
        self.process = process
        self.started = threading.Event()
        """Set when it runs or has ended."""
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def output(self) -> str:
        return "".join(self._lines[-20:]).strip()

    def _read(self) -> None:
        for line in cast("IO[str]", self.process.stdout):
            self._lines = [*self._lines[-50:], line]
            if _STARTED in line:
                self.started.set()
        self.process.wait()
        self.started.set()


def _line(script: str) -> str:
    """A line that runs a script of sh in any login shell.

    Shells differ in how they read newlines, backslashes and exclamation marks, even between quotes.
    """
    coded = base64.b64encode(script.encode()).decode("ascii")
    return f"""exec sh -c 'eval "$(echo "$1" | base64 -d)"' sh {coded}"""


def _wait(process: "subprocess.Popen[str]", seconds: float) -> int | None:
    """Its exit status. None if it still runs."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None
