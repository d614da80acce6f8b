"""Records what programs and a model say to each other, in rows to train on later.

    async with Gateway(sampler, chat).serving() as gateway:
        with Recording(Path("recorded/rows.jsonl"), chat) as rows:
            await record(gateway, Sampling(max_tokens=1024), rows, idle=300.0, say=print)  # until it is cancelled

A line of the file contains a row of `Conversation.rows`, token for token, with its messages. `recorded` turns lines
that a task has read into columns.
"""

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast

import msgspec
import numpy as np

from meshrl import log
from meshrl.agents.chat import Chat
from meshrl.agents.conversation import PER_TOKEN, Transcript, Turn, ragged_columns
from meshrl.agents.gateway import Feedback, Gateway, Session
from meshrl.data import IMAGES, MASKED, Batch, Images, data_url, names_in
from meshrl.errors import ConfigError, DataError, described
from meshrl.roles import Sampling
from meshrl.tasks import decoded_url

Over: TypeAlias = tuple[str, Batch, Sequence[Transcript]]
"""A finished conversation: the session's name, and the result of `Conversation.take`."""
_LOOK: Final = 1.0
"""Longest time between two checks for finished conversations, in seconds."""
_BLOCK: Final = 1 << 20
"""Bytes per read in the search for the end of the last whole line."""
_ANSWER: Final = re.compile(r"[0-9a-f]{16}-\d+\Z")
"""What of an answer's id stands in its row: the rest differs by protocol."""
_PER_ROW: Final[Mapping[str, type[np.generic]]] = {
    "oldest_version": np.int32,
    "temperature": np.float32,
    "truncated": np.bool_,
}


class Recording:
    """A file of rows. An incomplete last row, left by a killed process, is removed when the file is opened again."""

    def __init__(self, file: Path, chat: Chat) -> None:
        """Open the file for appending."""
        self.file = file
        self.chat = chat
        self._lock: int | None = None
        self._began = f"{time.time_ns():x}"
        self.rows: int = 0
        """Number of rows added."""

    def __enter__(self) -> Self:
        """Raises ConfigError if another process is writing to it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.file.with_name(f".{self.file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{self.file}: another process records there: give another folder") from error
        _cut(self.file)
        _cut(self.feedback)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def add(self, conversations: Sequence[Over]) -> None:
        """Append the rows of conversations.

        Raises OSError if the disk has no room for all of them. Then none is written.
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
        _append(self.file, lines)
        self.rows += len(rows)

    @property
    def feedback(self) -> Path:
        """The file of what was said about answers, next to the rows: `rows.feedback.jsonl` for `rows.jsonl`."""
        return self.file.with_name(f"{self.file.stem}.feedback.jsonl")

    def judge(self, feedback: Feedback) -> None:
        """Append feedback. OSError if the disk has no room for it."""
        _append(self.feedback, [msgspec.json.encode(feedback) + b"\n"])

    def _line(self, session: str, batch: Batch, row: int, transcript: Transcript, number: int) -> Mapping[str, object]:
        tokens, drawn = batch.tokens[row].tolist(), transcript.drawn.tokens.tolist()
        answer = () if isinstance(transcript.said, str) else (transcript.said,)
        return {
            "id": f"{self._began}-{number}",
            "session": session,
            "answers": [f"{session}-{turn + 1}" for turn in np.unique(batch.ragged("turn")[row]).tolist() if turn >= 0],
            "messages": [message.shown() for message in (*transcript.messages, *answer)],
            "tools": transcript.tools,
            "prompt": self._prompt(transcript, tokens),
            "completion": self.chat.decode(drawn, tokens[: -len(drawn)]),
            **{name: batch.ragged(name)[row].tolist() for name in PER_TOKEN},
            **{name: batch.row(name)[row].item() for name in _PER_ROW},
            **({MASKED: masked} if (masked := batch.objects(MASKED)[row]) is not None else {}),
            **self._images(batch, row),
        }

    def _images(self, batch: Batch, row: int) -> Mapping[str, object]:
        """The images of a row, as data URLs in order, if its model sees."""
        if IMAGES not in batch:
            return {}
        images = cast("Images", batch[IMAGES])
        return {IMAGES: [data_url(images.pool[name]) for name in images[row]]}

    def _prompt(self, transcript: Transcript, tokens: Sequence[int]) -> str:
        """The rendered prompt of the last answer."""
        if not transcript.messages:
            return transcript.prompt
        try:
            if any(names_in(message.content) for message in transcript.messages):
                raise DataError("a text alone does not have the images")
            return self.chat.render(transcript.messages, transcript.tools)
        except DataError:  # a template may refuse the messages, such as two calls at once
            return self.chat.decode(tokens[: -len(transcript.drawn.tokens)])


def _append(file: Path, lines: Sequence[bytes]) -> None:
    """Append lines, all or none. Raises OSError if the disk has no room."""
    with file.open("ab") as out:
        whole = out.tell()
        try:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        except OSError:
            with suppress(OSError):
                out.close()
            os.truncate(file, whole)
            raise


def _cut(file: Path) -> None:
    """Remove an incomplete last line."""
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
    """Record each finished conversation until this is cancelled.

    A conversation is finished after `idle` seconds without a request and with no answer pending, and at the end. Rows
    that do not fit on the disk wait for the next check. Raises OSError if the disk has no room at the end. `say` gets
    the base URL and key of each of the `sessions`.
    """
    opened = [gateway.open(sampling) for _ in range(sessions)]
    for session in opened:
        session.feedback = recording.judge
        names = {"OPENAI": session.url, "ANTHROPIC": session.root}
        lines = [f"export {name}_BASE_URL={url}\nexport {name}_API_KEY={session.token}" for name, url in names.items()]
        say("\n".join(lines))  # at once: who reads it may stop after the first lines
    seen: dict[Turn, tuple[int, float]] = {}
    waiting: list[Over] = []
    warned = False
    try:
        while True:
            await asyncio.sleep(min(_LOOK, idle / 4))
            now = asyncio.get_running_loop().time()
            pending = {session.conversation.first_of(prompt) for session in opened for prompt in session.draws.values()}
            seen = {
                first: seen[first] if first in seen and seen[first][0] == size and first not in pending else (size, now)
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
            gateway.close(session)  # no request may come after this
        recording.add([*waiting, *_taken(opened)])


def _taken(opened: Sequence[Session], over: Collection[Turn] | None = None) -> list[Over]:
    return [
        (session.id, *session.conversation.take(first))
        for session in opened
        for first in session.conversation.sizes()
        if over is None or first in over
    ]


def recorded(batch: Batch, feedback: Path | None = None) -> Batch:
    """Restore the columns of a task's rows that `meshrl record` wrote, token for token.

    Adds `tokens`, `loss_mask`, `sampler_logprobs`, `versions`, `oldest_version`, `temperature`, `truncated` and
    `masked` from the table in each row's `row`. With a file of `feedback` also `rewards` (float32) and `label` (bool or
    None): the last that was said of a row or of its newest answer, NaN and None if nothing was. Raises DataError if
    they are missing, or for a line of feedback that cannot be read.
    """
    rows = cast("tuple[Mapping[str, Any], ...]", batch.objects("row") if len(batch) else ())
    for number, row in enumerate(rows):
        if lacks := [name for name in (*PER_TOKEN, *_PER_ROW) if name not in row]:
            raise DataError(f"row {number} has no {lacks[0]!r}: `meshrl record` did not write these rows")
    per_row = {name: np.array([row[name] for row in rows], dtype) for name, dtype in _PER_ROW.items()}
    if any(IMAGES in row for row in rows):
        files = [[decoded_url(url, f"row {number}") for url in row.get(IMAGES, ())] for number, row in enumerate(rows)]
        batch = batch.assign(images=Images.of(files))
    if feedback is not None:
        rewards, labels = _feedback_in(feedback)
        names = {str(name) for row in rows for name in [row["id"], *row.get("answers", [])]}
        if strangers := (rewards.keys() | labels.keys()) - names:
            log.info(f"{len(strangers)} ids in {feedback} are of no row here", such_as=min(strangers))
        batch = batch.assign(
            rewards=np.array([_said_of(row, rewards, np.nan) for row in rows], np.float32),
            label=[_said_of(row, labels, None) for row in rows],
        )
    return batch.assign(**ragged_columns(rows), **per_row, masked=[row.get(MASKED) for row in rows])


def _feedback_in(file: Path) -> tuple[Mapping[str, float], Mapping[str, bool]]:
    """Return the last reward and the last label of each id. There may be no file."""
    rewards, labels = dict[str, float](), dict[str, bool]()
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            feedback = msgspec.json.decode(line, type=Feedback)
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break  # nothing, or a line that is being written
            raise DataError(f"{file}, line {number}: {error}") from error
        name = _ANSWER.search(feedback.id)
        for values, value in ((rewards, feedback.reward), (labels, feedback.label)):
            if value is not None:
                cast("dict[str, object]", values)[name.group() if name else feedback.id] = value
    return rewards, labels


def _said_of(row: Mapping[str, Any], values: Mapping[str, object], otherwise: object) -> Any:
    """What was said of a row, or else of its newest answer with feedback."""
    names = [str(row["id"]), *reversed(cast("list[str]", row.get("answers", [])))]
    return next((values[name] for name in names if name in values), otherwise)
