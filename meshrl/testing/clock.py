"""Virtual time: an event loop in which sleeping is free, and a seed chooses what runs next.

When nothing is ready, time jumps to the next timer. Without a timer, nothing can ever run again, and the loop raises
`Deadlock`, which says who waits for what.
"""

import asyncio
import gc
import heapq
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from random import Random
from types import AsyncGeneratorType, BuiltinMethodType, CoroutineType, FrameType, GeneratorType, MethodType
from typing import Never, TypeVar, TypeVarTuple, cast

from meshrl.errors import MeshrlError
from meshrl.events import Pending

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPIN = 1_000_000
"""Callbacks at one instant after which the loop reports an endless cycle."""
_COLLECT = 100_000
"""Callbacks between two garbage collections. `simulate` triggers them itself, always at the same places."""
_STDLIB = sysconfig.get_path("stdlib")
_CORE = str(Path(__file__).parents[1])
_BOUND = (BuiltinMethodType, MethodType)
_ALONE = (
    "virtual time has one thread and no real input and output: reserve meshes with Resources(cpus=0), which run in the "
    "caller's own loop, and give the program fakes instead of what reads files and sockets"
)


class Deadlock(MeshrlError):
    """Nothing can run, but the program has not ended. The text is the wait-for graph."""


class LeftRunning(MeshrlError):
    """The program ended, but tasks or async generators that it started have not, or a failed one was never awaited."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without a clock: `time()` is in virtual seconds from 0, and jumps to the next timer.

    `seed` chooses which of the ready tasks continues next, and the order of timers at the same instant. The guarantees
    of asyncio hold: callbacks run in the order of `call_soon`, tasks take their first steps in the order of their
    creation, and the callbacks of one future run in order. The same seed gives the same order in any process.

    There are no threads, files, sockets or signals: `run_in_executor` and `asyncio.to_thread` run the function at once.
    Raises `Deadlock` if nothing can run, at `time_limit` (virtual seconds), and if callbacks follow each other
    endlessly while no time passes.
    """

    def __init__(
        self, seed: int | None = None, time_limit: float | None = None, before_each: Callable[[], None] | None = None
    ) -> None:
        """`before_each`: called before each callback, which includes each step of a task."""
        super().__init__()
        self.callbacks: int = 0
        """Number of callbacks that have run or were skipped as cancelled."""
        self.unseen: list[Mapping[str, object]] = []
        """Failures reported to the loop's exception handler because nothing awaited them."""
        self._random = None if seed is None else Random(seed)
        self._draw: Callable[[], float] = self._random.random if self._random else lambda: 0.0
        self._limit = time_limit
        self._before_each = before_each
        self._now = 0.0
        self._queue: deque[asyncio.Handle] = deque()
        self._wakes: list[asyncio.Handle] = []
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0
        self._created = 0
        self._since = 0
        self._collecting = _COLLECT
        self._intruder: str | None = None
        self._around = set(threading.enumerate())
        self.set_exception_handler(lambda _, context: self.unseen.append(context))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        given = cast("tuple[object, ...]", args)
        if self._random is not None and len(given) == 1 and isinstance(given[0], asyncio.Future):
            self._settled(handle, callback, given[0])
        else:
            self._queue.append(handle)
        return handle

    def _settled(self, handle: asyncio.Handle, callback: object, future: asyncio.Future[object]) -> None:
        """Queue a callback of a completed future. Other tasks may overtake it, but not callbacks of the same future."""
        if _wakes_a_task(callback) and not (self._queue and any(_future(each) is future for each in self._queue)):
            self._wakes.append(handle)
            return
        earlier = [each for each in self._wakes if _future(each) is future] if self._wakes else []
        for each in earlier:
            self._wakes.remove(each)
        self._queue.extend(earlier)
        self._queue.append(handle)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio, in virtual seconds."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._created += 1
        heapq.heappush(self._timers, (when, self._draw(), self._created, handle))
        handle._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001 -- asyncio's, so that cancel() tells us
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio from the loop's own thread. From another thread it ends the simulation with `Deadlock`."""
        if asyncio._get_running_loop() is self or not self.is_running():  # noqa: SLF001 -- None in another thread
            return self.call_soon(callback, *args, context=context)
        self._intruder = threading.current_thread().name
        return asyncio.Handle(callback, args, self, context)

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call the function at once in this thread. It takes no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 -- whoever awaits the future gets it
            future.set_exception(error)
        return future

    def _no_files(self, *args: object, **kwargs: object) -> Never:
        raise Deadlock(f"the program waits for a file, a socket or a process; {_ALONE}")

    # Hooks of asyncio: every connection, server and pipe comes to one of them.
    def add_reader(self, fd: object, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Raises `Deadlock`: there is no real input and output in virtual time."""
        self._no_files()

    def add_writer(self, fd: object, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Raises `Deadlock`: there is no real input and output in virtual time."""
        self._no_files()

    async def sock_connect(self, sock: object, address: object) -> None:
        """Raises `Deadlock`: there is no real input and output in virtual time."""
        self._no_files()

    _make_socket_transport = _make_datagram_transport = _no_files
    _make_subprocess_transport = _make_read_pipe_transport = _make_write_pipe_transport = _no_files

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # A hook of asyncio. Many timers are cancelled long before they are due, such as timeouts.
        self._cancelled += 1
        if self._cancelled > 100 and self._cancelled > len(self._timers) // 2:
            self._timers = [timer for timer in self._timers if not timer[-1].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        # A hook of asyncio: one turn of `run_forever`. Runs all that is ready now, in some order.
        if self._intruder is not None:
            raise Deadlock(f"thread {self._intruder!r} called into virtual time, which no other thread keeps; {_ALONE}")
        if not self._queue and not self._wakes:
            self._jump()
        self._move_due()
        ready = len(self._queue) + len(self._wakes)
        for _ in range(ready):
            handle = self._next() if self._wakes else self._queue.popleft()
            if not handle.cancelled():
                if self._before_each is not None:
                    self._before_each()
                handle._run()  # noqa: SLF001 -- what a loop is for
            del handle  # this frame may live as long as an exception that was raised below it
        self.callbacks += ready
        self._since += ready
        if self.callbacks >= self._collecting and not gc.isenabled():
            self._collecting += _COLLECT
            gc.collect()
        if self._since > _SPIN:
            self._stall(f"{self._since:,} callbacks ran, each after another, while the time stood still")

    def _next(self) -> asyncio.Handle:
        """Choose by seed among the woken tasks and the first callback of the queue."""
        wakes = self._wakes
        chosen = int(self._draw() * (len(wakes) + bool(self._queue)))
        if chosen == len(wakes):
            return self._queue.popleft()
        future = _future(wakes[chosen]) if chosen else None
        first = next(index for index, each in enumerate(wakes) if _future(each) is future) if chosen else 0
        return wakes.pop(first)

    def _move_due(self) -> None:
        while self._timers and (self._timers[0][0] <= self._now or self._timers[0][-1].cancelled()):
            handle = heapq.heappop(self._timers)[-1]
            handle._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001 -- asyncio's
            if handle.cancelled():
                self._cancelled -= 1
            else:
                self._queue.append(handle)

    def _jump(self) -> None:
        while self._timers and self._timers[0][-1].cancelled():
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if not self._timers:
            self._stall("nothing can run, and no timer will change that")
        when = self._timers[0][0]
        if self._limit is not None and when > self._limit:
            self._now = self._limit
            self._stall(f"the time limit of {self._limit:g} s is reached")
        if when > self._now:
            self._now = when
            self._since = 0

    def _stall(self, what: str) -> Never:
        threads = [thread.name for thread in threading.enumerate() if thread not in self._around]
        aside = f"\n  other threads run besides the loop's ({', '.join(threads)}); {_ALONE}" if threads else ""
        lines = [f"  {each}" for each in (*Pending.of(self), *_standing(self.left()))] or ["  no task is left"]
        graph = "\n".join(lines)
        raise Deadlock(f"at {self._now:g} s of virtual time {what}:\n{graph}{aside}")

    def create_task(self, coro: Coroutine[object, object, T], **options: object) -> asyncio.Task[T]:  # type: ignore[override]
        """As in asyncio. A task without a name gets its number on this loop, which is the same in each run."""
        if options.get("name") is None:
            self._created += 1
            options["name"] = f"task {self._created}"
        return cast("asyncio.Task[T]", super().create_task(coro, **options))  # type: ignore[arg-type]

    def left(self) -> list[tuple[str, str]]:
        """The tasks that have not ended, by name, and where each waits."""
        tasks = [(task.get_name(), _where(task)) for task in asyncio.all_tasks(self) if not task.done()]
        return sorted(tasks, key=lambda task: (len(task[0]), task[0]))


def _wakes_a_task(callback: object) -> bool:
    """True if the callback wakes a task that awaits a future. Recognises C and Python tasks."""
    if not isinstance(callback, _BOUND):
        return False
    return callback.__name__.endswith("wakeup") and isinstance(callback.__self__, asyncio.Task)


def _future(handle: asyncio.Handle) -> asyncio.Future[object] | None:
    """The future whose callback this is, if any."""
    arguments = handle._args  # noqa: SLF001 -- asyncio has no other access
    return arguments[0] if arguments and len(arguments) == 1 and isinstance(arguments[0], asyncio.Future) else None


def _standing(tasks: list[tuple[str, str]]) -> list[str]:
    return [f"{name} stands at {where}" for name, where in tasks]


def _where(task: asyncio.Task[object]) -> str:
    """The innermost line outside Python and asyncio. If it is meshrl's, also the script's line that called it."""
    frames = [frame for frame in _frames(task.get_coro()) if not frame.f_code.co_filename.startswith(_STDLIB)]
    if not frames:
        return repr(task.get_coro())
    scripts = [frame for frame in frames if not frame.f_code.co_filename.startswith(_CORE)]
    if scripts and scripts[-1] is not frames[-1]:
        return f"{_line(frames[-1])}, called from {_line(scripts[-1])}"
    return _line(frames[-1])


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _frames(waiting: object) -> Iterator[FrameType]:
    """The frames of a chain of awaits, outermost first."""
    while waiting is not None:
        frame: FrameType | None = None
        inner: object = None
        if isinstance(waiting, CoroutineType):
            frame, inner = waiting.cr_frame, waiting.cr_await
        elif isinstance(waiting, AsyncGeneratorType):
            frame, inner = waiting.ag_frame, waiting.ag_await
        elif isinstance(waiting, GeneratorType):
            frame, inner = waiting.gi_frame, waiting.gi_yieldfrom
        elif not isinstance(waiting, asyncio.Future):  # `__anext__()` and similar objects do not expose what they await
            inside = gc.get_referents(waiting)
            inner = next((each for each in inside if isinstance(each, AsyncGeneratorType | CoroutineType)), None)
        if frame is not None:
            yield frame
        waiting = inner


def simulate(
    main: Callable[[], Coroutine[object, object, T]],
    *,
    seed: int | None = None,
    time_limit: float | None = None,
    before_each: Callable[[], None] | None = None,
) -> T:
    """Run a program to its end in a new `VirtualLoop`, and return its result.

    `before_each`: called before each callback, which includes each step of a task. Raises `Deadlock`, `LeftRunning`, or
    what the program raises. A process can run only one simulation at a time. If a loop runs in this thread, as in a
    notebook, the simulation runs in another thread while this one waits.
    """
    run = partial(_run, main, VirtualLoop(seed, time_limit, before_each))
    if asyncio._get_running_loop() is None:  # noqa: SLF001 -- the public one raises
        return run()
    with ThreadPoolExecutor(1, "meshrl-simulation") as thread:
        return thread.submit(copy_context().run, run).result()


def _run(main: Callable[[], Coroutine[object, object, T]], loop: VirtualLoop) -> T:
    collecting = gc.isenabled()
    gc.disable()  # automatic collections finalise generators, and so schedule callbacks, at places that no seed chooses
    gc.collect(1)  # so that what is young is the program's
    try:
        result = loop.run_until_complete(main())
        _settle(loop)
        return result
    finally:
        _end(loop)
        if collecting:
            gc.enable()


def _settle(loop: VirtualLoop) -> None:
    """Let everything end that can without waiting, and raise for the rest."""
    for _ in range(100):
        if not loop.left():
            break
        loop.run_until_complete(asyncio.sleep(0))
    if left := loop.left():
        tasks = "\n  ".join(_standing(left))
        raise LeftRunning(f"the program has ended, but these tasks have not: await or cancel them:\n  {tasks}")
    generators = cast("set[object]", loop._asyncgens)  # type: ignore[attr-defined]  # noqa: SLF001 -- asyncio's own list
    generation = 0 if loop._collecting == _COLLECT else 2  # noqa: SLF001 -- a collection has made what it left old
    for _ in range(10):  # the end of one may release the next
        if not generators:
            break
        gc.collect(generation)  # for unreachable cycles
        generation = 2
        loop.run_until_complete(asyncio.sleep(0))
    if generators:
        names = sorted(str(getattr(each, "__qualname__", each)) for each in generators)
        raise LeftRunning(
            f"the program has ended, but these async generators have not: {', '.join(names)}; read them to their end, "
            f"or close them with `async with contextlib.aclosing(...)`"
        )
    if loop.unseen:
        error = loop.unseen[0].get("exception")
        raise LeftRunning(f"nobody saw this failure: {loop.unseen[0].get('message')}: {error!r}") from (
            error if isinstance(error, BaseException) else None
        )


def _end(loop: VirtualLoop) -> None:
    """Cancel what is left, to avoid warnings."""
    loop.set_exception_handler(lambda _, __: None)
    try:
        for _ in range(10):
            tasks = asyncio.all_tasks(loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=1e-9))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except Deadlock:
        pass  # the original failure is the one to report
    finally:
        loop.close()
