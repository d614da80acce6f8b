"""The Ray cluster: find or start it, list the resources of its nodes, and check whether a mesh can fit."""

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from math import floor
from secrets import token_hex
from threading import Thread, current_thread, main_thread
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import ray

from meshrl import log
from meshrl.engines.ray.code import Versions
from meshrl.engines.remote import HealthPort, Reply, is_reachable, monitor_of
from meshrl.errors import ConfigError, NoRoom, described
from meshrl.mesh import Resources, boot_id, free_cores

Amounts: TypeAlias = Mapping[str, float]
"""The amount of each of Ray's resources."""


class Node(NamedTuple):
    """A machine of the cluster."""

    id: str
    address: str
    port: int
    """The port of Ray's own process on the node."""
    has: Amounts
    """All its resources, taken ones included."""


class Machine(NamedTuple):
    """The machine of a process, as others see it."""

    host: str
    boot: str
    health_port: HealthPort

    def __str__(self) -> str:
        return f"{self.host} ({self.health_port.ip})"

    @property
    def is_here(self) -> bool:
        """True if it is this machine."""
        return self.boot == boot_id()


def nodes() -> list[Node]:
    """Return the living nodes that the head knows. Blocks."""
    known = cast("list[dict[str, object]]", ray.nodes())
    return [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            int(cast("int", node["NodeManagerPort"])),
            cast("Amounts", node["Resources"]),
        )
        for node in known
        if node.get("Alive")
    ]


def this_machine(patience: float) -> Machine:
    """Describe this machine. `patience`: seconds after which others give it up if they cannot reach it."""
    own = ray.get_runtime_context().get_node_id()
    here = next(node for node in nodes() if node.id == own)
    return Machine(socket.gethostname(), boot_id(), HealthPort(here.address, here.port, patience))


T = TypeVar("T")

NOTHING: Final[Amounts] = {"memory": 1}
"""The reservation of a rank without needs. Ray refuses an empty request, and one byte is always available."""
_ANSWER: Final = 10.0
"""Seconds within which a cluster's address must accept a connection."""
_TEMPORARY: Final = 36
"""Bytes of a temporary folder in which Ray's sockets still have paths of at most 107 bytes."""
_AGAIN: Final = 0.5
"""Seconds between two checks whether silent nodes answer again."""
_LAG: Final = 1.0
"""Seconds until all of Ray has seen what a node gave back."""


class Cluster:
    """This process's connection to Ray. Stops the cluster at the end only if it was started here."""

    def __init__(
        self, address: str | None, patience: float, packages: Sequence[str], on_lost: Callable[[str], None]
    ) -> None:
        """`address`: HOST:PORT, or `auto`. None: RAY_ADDRESS, or without it a new cluster.

        `patience`: seconds after which an unreachable node is given up. `on_lost`: called with the reason if that is
        the head. `packages`: see `Versions`.
        """
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._patience = patience
        self._versions = Versions(packages, patience)
        self._on_lost = on_lost
        self._connecting: asyncio.Task[_Link] | None = None
        self._head: HealthPort | None = None
        self._machine: Machine | None = None
        self._open = Reply()
        """Arrives when this is closed."""
        self._gone = asyncio.Event()
        """Set when the head is given up."""
        self.lost: str = ""
        """Why the cluster cannot be used any more."""
        self.silent: dict[str, HealthPort] = {}
        """Nodes that do not answer. Ray may consider them alive for up to another minute."""

    async def connect(self) -> None:
        """Connect, once. Raises `ConfigError` if no cluster answers, or it was lost."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)
        if self.lost:
            raise ConfigError(self.lost)

    async def _connect(self) -> "_Link":
        link = await _connect(self._address)
        self._head = HealthPort(*host_and_port(ray.get_runtime_context().gcs_address), self._patience)
        monitor_of(self._head).watch(self._open, self)
        self._machine = await self.ask(partial(this_machine, self._patience))
        return link

    @property
    def machine(self) -> Machine:
        """The place of this process, once it is connected."""
        return cast("Machine", self._machine)

    def lose(self, reason: str) -> None:
        """Give the head up. Without it no rank can be found, made or ended, and Ray waits for it in vain."""
        self.lost = f"Ray's head is gone, without which no rank can be used: {reason}"
        self._gone.set()
        self._on_lost(self.lost)

    async def nodes(self) -> list[Node]:
        """Return the living nodes. Those that do not answer within the patience become `silent`."""
        living = await self.ask(nodes)
        ports = [HealthPort(node.address, node.port, self._patience) for node in living]
        answers = await asyncio.gather(*map(is_reachable, ports))
        self.silent = {node.id: port for node, port, heard in zip(living, ports, answers, strict=True) if not heard}
        return [node for node in living if node.id not in self.silent]

    async def one_answers(self, silent: Mapping[str, HealthPort]) -> None:
        """Wait until a silent node answers."""
        while not any(answers := await asyncio.gather(*map(is_reachable, silent.values()))):  # noqa: ASYNC110 -- of others
            await asyncio.sleep(_AGAIN)
        for node, heard in zip(silent, answers, strict=True):
            if heard:
                self.silent.pop(node, None)

    async def check(self, nodes: Mapping[str, str], *, have_ranks: bool = False) -> bool:
        """Raise `OtherVersions` if a node has others than this process. See `Versions.check`."""
        return self.is_ours or await self._versions.check(nodes, have_ranks=have_ranks)

    async def with_free_cores(self, among: Sequence[Node]) -> list[Node]:
        """Return the nodes with only the cores that are free now: two free ones may be on different nodes."""
        from ray._private.state import available_resources_per_node  # noqa: PLC0415 -- Ray has no public way to ask

        free = cast("Mapping[str, Amounts]", await self.ask(available_resources_per_node))
        return [node._replace(has={**node.has, "CPU": free.get(node.id, {}).get("CPU", 0)}) for node in among]

    async def free(self) -> Amounts:
        """Return the free resources, a moment late."""
        return cast("Amounts", await self.ask(ray.available_resources))

    async def ask(self, question: Callable[[], T]) -> T:
        """Ask Ray's head. Raises `ConfigError` if the head is given up first, for which Ray would wait forever."""
        answer: Future[T] = Future()
        # A daemon thread, because threads of the loop would keep this process from ending before the answer.
        Thread(target=_answer, args=(question, answer), name="meshrl-ray-head", daemon=True).start()
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(_completed(answer)),
            asyncio.create_task(self._gone.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not answer.done():
            raise ConfigError(self.lost)
        return answer.result()

    async def free_cores(self, expected: float) -> float:
        """Return the number of free cores. Released ones show up late, so wait a moment for the expected number."""
        free, until = 0.0, time.monotonic() + _LAG
        while free < expected and time.monotonic() < until:
            free = (await self.free()).get("CPU", 0)
            await asyncio.sleep(_LAG / 20)
        return free

    @property
    def is_ours(self) -> bool:
        """True if the cluster was started here, so nobody else uses it."""
        connecting = self._connecting
        return bool(connecting and connecting.done() and connecting.result() == "started")

    async def close(self) -> None:
        """Disconnect, and stop the cluster if it was started here."""
        self._open.arrive(None)
        connecting, self._connecting = self._connecting, None
        if connecting is None or connecting.cancelled():
            return
        with suppress(ConfigError):
            if await connecting != "found" and await self._is_there():
                ray.shutdown()

    async def _is_there(self) -> bool:
        """True if Ray can disconnect from the head. Otherwise it would wait, and keep this process from ending."""
        if self.lost or not (self._head and await is_reachable(self._head)):
            atexit.unregister(ray.shutdown)
            atexit.register(_leave)
            return False
        return True


def _leave() -> None:
    """End this process after all other exit handlers. Ray, which has not disconnected, would crash it."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # noqa: SLF001 -- earlier registrations run later
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


async def _completed(answer: "Future[T]") -> None:
    await asyncio.wrap_future(answer)


def _answer(question: Callable[[], T], answer: "Future[T]") -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        value = question()
    except Exception as error:  # noqa: BLE001 -- the waiter gets it
        answer.set_exception(error)
    else:
        answer.set_result(value)


_Link: TypeAlias = Literal["started", "joined", "found"]
"""The origin of the connection: a cluster that was started here, one that was joined, or an existing connection."""


async def _connect(address: str | None) -> _Link:
    if ray.is_initialized():
        return "found"
    if address is None:
        cores = free_cores()
        write_log = partial(log.info, "starting Ray on this machine, which takes about five seconds", cores=cores)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        folder = None if len(os.fsencode(temporary)) <= _TEMPORARY else "/tmp/ray"  # noqa: S108 -- Ray's own
        # The first log line imports its writer, and Ray need not wait for that.
        logged = asyncio.get_running_loop().run_in_executor(None, write_log)
        # Not in a separate thread: Ray's processes would end with it.
        began = time.monotonic()
        try:
            with _own_token(), _own_sigterm():
                ray.init(
                    "local", num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=folder
                )
        except Exception as error:
            seconds = f"within {time.monotonic() - began:.0f} s"
            advice = (
                "the machine may be overloaded: run the command again"
                if "timed out" in str(error) or isinstance(error, TimeoutError)
                else f"Ray writes to the temporary folder, {temporary} (TMPDIR), and to the home folder (HOME): let "
                "this user write there, or name others"
            )
            raise ConfigError(
                f"Ray did not start on this machine {seconds}: {described(error)}; {advice}; or start Ray yourself "
                "with `ray start --head` and set run.engine = 'auto'"
            ) from error
        finally:
            await logged
        return "started"
    if ":" in address:
        await _reach(address)
    try:
        with _own_sigterm():
            ray.init(address, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise _unreachable(address, error) from error
    return "joined"


@contextmanager
def _own_token() -> Generator[None]:
    """Give a new cluster a token in the environment. Ray would write one to the home folder, which may be read-only."""
    if any(name.startswith("RAY_AUTH_") for name in os.environ):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = token_hex(16)
    try:
        yield
    except BaseException:
        del os.environ["RAY_AUTH_TOKEN"]
        raise


@contextmanager
def _own_sigterm() -> Generator[None]:
    """Keep a handler of SIGTERM. Ray replaces it by one that ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or current_thread() is not main_thread():
        yield
        return
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        handler(signal.SIGTERM, None)  # it has not heard of it
        raise asyncio.CancelledError from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT. An IPv6 address loses its brackets. ValueError if the port is not a number."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _reach(address: str) -> None:
    """Check that the address accepts a connection. Ray itself would try for a minute, and then end the process."""
    try:
        async with asyncio.timeout(_ANSWER):
            _, writer = await asyncio.open_connection(*host_and_port(address))
            writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> ConfigError:
    reason = str(error) or type(error).__name__
    return ConfigError(
        f"no Ray cluster answers at {address}: {reason}; start one with `ray start --head`, or set run.engine = 'ray' "
        "without RAY_ADDRESS to start one on this machine. If Ray asks for a token, set RAY_AUTH_MODE=token"
    )


def room_for(request: Amounts, has: Amounts) -> int:
    """Return the number of ranks with this request that fit on a node."""
    rooms = [
        floor(has.get(name, 0)) * floor(1 / amount + 1e-9)
        if name == "GPU" and amount < 1  # a share cannot span two GPUs
        else floor(has.get(name, 0) / amount + 1e-9)
        for name, amount in request.items()
    ]
    return min(rooms)


def amounts(resources: Resources, cpus: int) -> Amounts:
    """Return the resources that each rank reserves from Ray."""
    wanted = {"CPU": float(cpus), "GPU": resources.gpus, **resources.custom}
    return {name: amount for name, amount in wanted.items() if amount} or NOTHING


def has_room(count: int, request: Amounts, nodes: Sequence[Node]) -> bool:
    """True if the nodes could hold that many ranks if they were idle."""
    return sum(room_for(request, node.has) for node in nodes) >= count


def check_room(count: int, request: Amounts, nodes: Sequence[Node], silent: Iterable[HealthPort] = ()) -> None:
    """Raise `NoRoom` if even idle nodes could not hold the ranks. `silent`: nodes that do not answer."""
    if not has_room(count, request, nodes):
        room = sum(room_for(request, node.has) for node in nodes)
        lines = [f"  {node.address} has {written(node.has)}" for node in nodes]
        listing = "\n".join([*lines, *(f"  {port.ip} does not answer" for port in silent)])
        raise NoRoom(
            f"a mesh asks for {count} ranks with {written(request)} each, and the cluster has room for {room}:\n"
            f"{listing}\nask for fewer ranks or less for each, or add nodes"
        )


def written(amounts: Amounts) -> str:
    """Write amounts for people, without memory and Ray's own markers."""
    own = ("node:", "object_store_memory", "accelerator_type:", "memory", "bundle_group_")
    shown = {name: amount for name, amount in amounts.items() if not name.startswith(own) and "_group_" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
