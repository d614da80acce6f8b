"""Records what programs and a model say to each other, in rows to train on later.

    async with Gateway(sampler, chat).serving() as gateway:
        with Recording(Path("recorded/rows.jsonl"), chat) as rows:
            await record(gateway, Sampling(max_tokens=1024), rows, idle=300.0, say=print)  # until it is cancelled

A line of the file is what `Conversation.rows` has of a conversation, token for token, with its messages. `recorded`
makes columns of lines that a task has read.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, cast

import msgspec
import numpy as np

from meshrl import log
from meshrl.agents.chat import Chat
from meshrl.agents.conversation import Transcript, Turn
from meshrl.agents.gateway import Gateway, Session
from meshrl.data import Batch, Ragged, Source
from meshrl.errors import ConfigError, DataError, described
from meshrl.roles import Sampling

Over: TypeAlias = tuple[str, Batch, Sequence[Transcript]]
"""A conversation that is over: the name of its session, and what `Conversation.take` gives."""
_LOOK: Final = 1.0
"""Seconds, at most, between two looks for conversations that are over."""
_BLOCK: Final = 1 << 20
"""Bytes that are read at once where the end of the last whole line is looked for."""
_PER_TOKEN: Final[Mapping[str, type[np.generic]]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "sampler_logprobs": np.float32,
    "versions": np.int32,
}
_PER_ROW: Final[Mapping[str, type[np.generic]]] = {
    "oldest_version": np.int32,
    "temperature": np.float32,
    "truncated": np.bool_,
}


class Recording:
    """A file of rows, which grows by whole rows: one that a process could not end is cut off by the next."""

    def __init__(self, file: Path, chat: Chat) -> None:
        """A file that is there already is gone on with."""
        self.file = file
        self.chat = chat
        self._lock: int | None = None
        self._began = f"{time.time_ns():x}"
        self.rows: int = 0
        """How many were added."""

    def __enter__(self) -> Self:
        """ConfigError where another process adds to it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.file.with_name(f".{self.file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{self.file}: another process records there: give another folder") from error
        _cut(self.file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def add(self, conversations: Sequence[Over]) -> None:
        """Write the rows of conversations behind those that are there.

        OSError where the disk has no room for all: then none is written.
        """
        rows = [
            (session, batch, row, transcript)
            for session, batch, transcripts in conversations
            for row, transcript in enumerate(transcripts)
        ]
        if not rows:
            return
        lines = [
            msgspec.json.encode(self._line(*row, number)) + b"\n" for number, row in enumerate(rows, self.rows + 1)
        ]
        with self.file.open("ab") as out:
            whole = out.tell()
            try:
                out.writelines(lines)
                out.flush()
                os.fsync(out.fileno())
            except OSError:
                with suppress(OSError):
                    out.close()
                os.truncate(self.file, whole)
                raise
        self.rows += len(rows)

    def _line(self, session: str, batch: Batch, row: int, transcript: Transcript, number: int) -> Mapping[str, object]:
        answer = () if isinstance(transcript.said, str) else (transcript.said,)
        return {
            "id": f"{self._began}-{number}",
            "session": session,
            "messages": [message.shown() for message in (*transcript.messages, *answer)],
            "tools": transcript.tools,
            "prompt": self._prompt(transcript, batch.tokens[row].tolist()),
            "completion": self.chat.decode(transcript.drawn.tokens.tolist()),
            **{name: batch.ragged(name)[row].tolist() for name in _PER_TOKEN},
            **{name: batch.row(name)[row].item() for name in _PER_ROW},
        }

    def _prompt(self, transcript: Transcript, tokens: Sequence[int]) -> str:
        """What the last answer was asked with, as the template writes it."""
        if not transcript.messages:
            return transcript.prompt
        try:
            return self.chat.render(transcript.messages, transcript.tools)
        except DataError:  # a template may refuse what was said, such as two calls at once
            return self.chat.decode(tokens[: -len(transcript.drawn.tokens)])


def _cut(file: Path) -> None:
    """Cut off a last line that has no end."""
    if not file.exists():
        return
    with file.open("rb+") as out:
        end = out.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _BLOCK)
            out.seek(begin)
            newline = out.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        out.truncate(end)


async def record(
    gateway: Gateway,
    sampling: Sampling,
    recording: Recording,
    idle: float,
    say: Callable[[str], None],
    sessions: int = 1,
) -> None:
    """Let programs talk to the model until this is cancelled, and write down each conversation that is over.

    One is over where nobody has gone on with it for `idle` seconds and nobody waits for an answer, and at the end.
    What the disk has no room for waits for the next look; OSError where it has none at the end. `say` is told the base
    URL and the key of each of the `sessions`.
    """
    opened = [gateway.open(sampling) for _ in range(sessions)]
    for session in opened:
        say(f"export OPENAI_BASE_URL={session.url}\nexport OPENAI_API_KEY={session.token}")
    seen: dict[Turn, tuple[int, float]] = {}
    waiting: list[Over] = []
    warned = False
    try:
        while True:
            await asyncio.sleep(min(_LOOK, idle / 4))
            now = asyncio.get_running_loop().time()
            asked = {session.conversation.first_of(prompt) for session in opened for prompt in session.draws.values()}
            seen = {
                first: seen[first] if first in seen and seen[first][0] == size and first not in asked else (size, now)
                for session in opened
                for first, size in session.conversation.sizes().items()
            }
            waiting += _taken(opened, [first for first, (_, since) in seen.items() if now - since >= idle])
            try:
                recording.add(waiting)
                waiting.clear()
            except OSError as error:
                if not warned:
                    log.warning(f"{recording.file} cannot be written; rows wait until it can", error=described(error))
                warned = True
    finally:
        for session in opened:
            gateway.close(session)  # so that nothing comes after this
        recording.add([*waiting, *_taken(opened)])


def _taken(opened: Sequence[Session], over: Collection[Turn] | None = None) -> list[Over]:
    """The conversations of sessions that are over, or all."""
    return [
        (session.id, *session.conversation.take(first))
        for session in opened
        for first in session.conversation.sizes()
        if over is None or first in over
    ]


def recorded(batch: Batch) -> Batch:
    """The rows of a task that `meshrl record` wrote, with the columns that they had, token for token.

    Adds `tokens`, `loss_mask`, `sampler_logprobs`, `versions`, `oldest_version`, `temperature` and `truncated`, of the
    table that each row of the task has in `row`. DataError where it has none of these.
    """
    rows = cast("tuple[Mapping[str, Sequence[object]], ...]", batch.objects("row") if len(batch) else ())
    for number, row in enumerate(rows):
        if lacks := [name for name in (*_PER_TOKEN, *_PER_ROW) if name not in row]:
            raise DataError(f"row {number} has no {lacks[0]!r}: these are no rows that `meshrl record` wrote")
    sources = {"sampler_logprobs": Source("sampler")}
    columns = {
        name: Ragged.of([np.array(row[name], kind) for row in rows], kind, source=sources.get(name))
        for name, kind in _PER_TOKEN.items()
    }
    return batch.assign(
        **columns, **{name: np.array([row[name] for row in rows], kind) for name, kind in _PER_ROW.items()}
    )
