"""A conversation, token for token: sampled tokens are what later prompts hold and what is trained on.

    prompt = conversation.ask(messages, tools)            # the ids that the model continues
    ...                                                   # draw after prompt.tokens
    conversation.answer(prompt, drawn, message)           # what was drawn, and the client's message
    conversation.rows()                                   # a Batch

A client sends its whole history as text with each request. If the history begins with a recorded turn, in the same
meaning, the prompt is the ids of that turn, followed by the ids of the text that the template puts after the answer.
Neither the history nor the answer is tokenised again. If no such turn is found, the whole history is rendered, with the
model's thoughts where a client has dropped them. The conversation branches there and gets one more row. This happens at
the first request, for a sub-agent, and after the history was edited or shortened. The log says what was edited.
"""

import hashlib
import itertools
import json
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import ne
from typing import Final, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl import log
from meshrl.agents.chat import Chat, Function, Message, SeeingChat, Tool, key_after
from meshrl.agents.meaning import Meaning, added_to, difference, meanings_of
from meshrl.data import FINGERPRINTS, IMAGES, Batch, Images, Ragged, Source, Span, masked_text, names_in, unmarked
from meshrl.errors import DataError
from meshrl.mesh import Array
from meshrl.tags import without_special

T = TypeVar("T")
Ints = NDArray[np.int32]

PER_TOKEN: Final[Mapping[str, type[np.generic]]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "sampler_logprobs": np.float32,
    "versions": np.int32,
}
"""The standard token columns of a row."""
_MARK: Final = "what the assistant wrote stands here"
_COMPARED: Final = 32
"""A changed history is compared with this many of a session's newest rows, and of those whose last answer it has."""
_LOGGED: Final = 20
"""Number of changed histories that are logged. After these, only each one whose number is a power of two is."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a sampler drew in one turn: at least one token."""

    tokens: Ints
    """The ids, int32[tokens]."""
    logprobs: NDArray[np.float32]
    """Log-prob of each token at the sampler's temperature, float32[tokens]."""
    versions: Ints
    """The policy version that sampled each token, int32[tokens]."""
    temperature: float
    """Sampling temperature. The policy divides its logits by it too."""
    truncated: bool = False
    """True if the answer was cut short."""
    experts: NDArray[np.int16] | None = None
    """With `sampler.record_experts`, the experts of the prompt's and drawn tokens: int16[tokens, layers, experts per
    token]."""
    mask: str | None = None
    """The constraint under whose mask it was drawn, as `meshrl.data.Span` has it. None if it was drawn freely."""
    fingerprints: Sequence[str] | None = None
    """What the sampler's processor made of each image of the prompt. None if the sampler does not say."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A prompt and the answer drawn after it. Tokens of the previous turn are not stored again."""

    before: "Turn | None"
    """The turn with which the prompt begins."""
    added: Ints
    """The prompt's ids after that turn, int32[tokens]."""
    drawn: Drawn
    number: int
    """Index among the session's answers, from 0."""
    key: bytes
    """Key of the messages before the answer, or of a text with its completion."""
    heard: Sequence[Meaning] = ()
    """The messages after those of the previous turn, including the answer. Empty for a text."""
    length: int = 0
    """Length of the text in characters, 0 for messages."""
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    """The files of the images that `heard` names and no turn before has, by name."""
    unseen: str = ""
    """The text that ended the answer and was withheld from the client."""
    is_cut: bool = False
    """True if a request for exactly that text continues the turn."""

    def path(self) -> list["Turn"]:
        """The turns that lead to this one in order, including this one."""
        turns: list[Turn] = [self]
        while (before := turns[-1].before) is not None:
            turns.append(before)
        return turns[::-1]

    def history(self) -> Sequence[Meaning]:
        """All messages, including the answer."""
        return [each for turn in self.path() for each in turn.heard]

    def pool(self) -> dict[str, bytes]:
        """The files of all images that it has heard of, by name."""
        return {name: file for turn in self.path() for name, file in turn.images.items()}

    def tokens(self) -> Ints:
        """All ids of the prompt and the answer, int32[tokens]."""
        return np.concatenate([part for turn in self.path() for part in (turn.added, turn.drawn.tokens)])


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt for the model."""

    tokens: Ints
    """All ids, int32[tokens]."""
    before: Turn | None
    """The turn that it continues. None if the conversation begins or branches here."""
    added: Ints
    """The ids after that turn, int32[tokens]."""
    asked: bytes | str = field(repr=False)
    """What the client sent: the key of the messages, or a text."""
    heard: Sequence[Meaning] = field(default=(), repr=False)
    """The messages after that turn."""
    messages: Sequence[Message] = field(default=(), repr=False)
    """All messages, with the model's answers as it gave them."""
    tools: Sequence[Tool] = field(default=(), repr=False)
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    """The files of the images that the messages name, by name."""


@dataclass(frozen=True, eq=False)
class Transcript:
    """A conversation as text: the messages, with answers as the model gave them, or the prompt. And the last answer."""

    prompt: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    said: Message | str
    drawn: Drawn
    """The final answer as it was drawn."""


class Conversation:
    """The turns of one session, in the order of their answers. Several can be in progress at once."""

    def __init__(self, chat: Chat, changes: Iterator[int] | None = None) -> None:
        """`changes`: numbers of changed histories from 1 on, which conversations may share."""
        self._chat = chat
        self._changes = changes or itertools.count(1)
        self._answers = 0
        self._firsts: dict[Turn, Turn] = {}
        """The first turn of each turn's conversation, in the order of the answers."""
        self._turns: dict[Turn, list[Turn]] = {}
        """Turns of each conversation, by its first turn."""
        self._transcripts: dict[Turn, Transcript] = {}
        """Transcripts of turns that no other turn continues."""
        self._learned: WeakSet[Turn] = WeakSet()
        """Turns of rows that were taken."""
        self._by_key: defaultdict[bytes, list[Turn]] = defaultdict(list)
        """Turns by their keys."""
        self._lengths: Counter[int] = Counter()
        """Number of turns after prompts without messages, by the length of their text in characters."""

    def __len__(self) -> int:
        """Number of answered turns."""
        return self._answers

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Mapping[str, bytes] | None = None,
        *,
        is_trial: bool = False,
    ) -> Prompt:
        """Return the prompt of the next turn. Raises DataError without messages, or if the template refuses them.

        `images`: the files of those that messages name, as `data.Images` has them. `is_trial`: the prompt is looked at
        and not answered, so the log says nothing of a changed history.
        """
        files = images or {}
        if not messages:
            raise DataError("there are no messages: a conversation needs one to begin with")
        key, heard, turns, is_changed = self._followed(messages, tools)
        if is_changed or (turns and list(turns.values())[-1] not in self._transcripts):
            answers = self._put_back(heard, turns)
            if not is_trial:
                self._log_change(heard, turns, tools, answers)
        shown = [each.message for each in heard]
        for end, turn in reversed(turns.items()):
            behind = self._behind(shown, end, tools, turn, files)
            if behind is not None:
                prompt = self._continued(turn, behind, key)
                return replace(prompt, heard=heard[end:], messages=shown, tools=tools, images=files)
        try:
            text = self._rendered(shown, tools, files)
        except DataError:  # such as a template that takes no two messages of the assistant in a row
            text = self._rendered(messages, tools, files)
        tokens = self._encoded(text)
        return Prompt(tokens, None, tokens, key, heard, shown, tools, files)

    def ask_text(self, text: str) -> Prompt:
        """Return the prompt of a completion without messages. It continues the longest turn with which the text begins.

        A text that ends exactly where a turn does continues it only if the turn was cut short. Otherwise it is a new
        request.
        """
        begins: tuple[int, Turn] | None = None
        for length, key in _keys_of(text, [length for length in sorted(self._lengths) if length <= len(text)]):
            turns = self._by_key.get(key)
            if turns and (length < len(text) or turns[-1].is_cut):
                begins = length, turns[-1]
        if begins is None:
            tokens = np.array(self._chat.begin(unmarked(text)), np.int32)
            return Prompt(tokens, None, tokens, text)
        length, turn = begins
        behind = text[length:].removeprefix(turn.unseen)  # a client that was stopped there may add the stop text itself
        if behind and self._sees:
            self._chat.begin(unmarked(behind))  # refuses what a model reads as an image
        return self._continued(turn, self._encoded(behind, turn), text)

    def answer(self, prompt: Prompt, drawn: Drawn, said: Message | str) -> None:
        """Record a turn and what the client received: a message, or the text after a prompt without messages.

        Raises DataError if nothing was drawn, if the temperature differs from that of the turn before, or if `said` is
        of the other kind.
        """
        if not len(drawn.tokens):
            raise DataError("a turn needs at least one token: the sampler found no room after the prompt")
        if prompt.before is not None and prompt.before.drawn.temperature != drawn.temperature:
            raise DataError(
                f"the turn before was drawn at temperature {prompt.before.drawn.temperature:g} and this one at "
                f"{drawn.temperature:g}: draw all turns of a conversation at one"
            )
        if drawn.experts is not None:  # earlier turns have recorded theirs
            drawn = replace(drawn, experts=drawn.experts[len(prompt.tokens) - len(prompt.added) :])
        length, is_cut, heard = 0, False, list[Meaning]()
        if isinstance(said, Message) and isinstance(prompt.asked, bytes):
            key, content, heard = prompt.asked, said.content, [*prompt.heard, *meanings_of([said])]
        elif isinstance(said, str) and isinstance(prompt.asked, str):
            content, length, is_cut = said, len(prompt.asked) + len(said), drawn.truncated and bool(said)
            ((_, key),) = _keys_of(prompt.asked + said, [length])
        else:
            raise DataError("messages are answered by a Message, and a text by a text")
        unseen = ""
        if drawn.tokens[-1] not in self._chat.ends:
            text = self._chat.decode(drawn.tokens.tolist(), prompt.tokens.tolist())
            unseen = text[len(content) :] if text.startswith(content) else ""
        had = prompt.before.pool() if prompt.before else {}
        new = {name: prompt.images[name] for name in _named(each.message for each in heard) if name not in had}
        turn = Turn(prompt.before, prompt.added, drawn, len(self), key, heard, length, new, unseen, is_cut)
        first = self.first_of(prompt) or turn
        self._firsts[turn] = first
        self._by_key[key].append(turn)
        self._turns.setdefault(first, []).append(turn)
        if length:
            self._lengths[length] += 1
        self._answers += 1
        if prompt.before is not None:
            self._transcripts.pop(prompt.before, None)
        asked = prompt.asked if isinstance(prompt.asked, str) else ""
        self._transcripts[turn] = Transcript(asked, prompt.messages, prompt.tools, said, drawn)

    def sizes(self) -> Mapping[Turn, int]:
        """Number of turns of each conversation, by its first turn. A conversation that branches counts once."""
        return {first: len(turns) for first, turns in self._turns.items()}

    def first_of(self, prompt: Prompt) -> Turn | None:
        """The first turn of the conversation that the prompt continues. None if it begins a new one."""
        return self._firsts.get(prompt.before) if prompt.before else None

    def take(self, first: Turn) -> tuple[Batch, Sequence[Transcript]]:
        """Remove the conversation that began with this turn. Returns its rows and a transcript of each.

        What a client adds to it later begins another conversation.
        """
        own = self._turns.pop(first)
        rows = self._rows(own)
        transcripts = [self._transcripts.pop(turn) for turn in own if turn in self._transcripts]
        self._learned.update(own)  # an answer to one of them may be on its way
        for turn in own:
            del self._firsts[turn]
            self._by_key[turn.key].remove(turn)
            if not self._by_key[turn.key]:
                del self._by_key[turn.key]
            if turn.length:
                self._lengths[turn.length] -= 1
        self._lengths = +self._lengths
        return rows, transcripts

    def transcripts(self) -> Sequence[Transcript]:
        """What the client has of each row of `rows`, in the same order."""
        return list(self._transcripts.values())

    def rows(self) -> Batch:
        """One row for each turn that no other turn continues, in order, with all ids from the first prompt on.

        Columns: `prompt`, `completion` (texts, for people), `tokens`, `loss_mask`, `sampler_logprobs`, `versions`,
        `turn` (int32, for each learnt token the index of its answer in the session, -1 elsewhere), `masked` (which
        learnt tokens were drawn under a constraint, as text, or None), `oldest_version`,
        `temperature`, `truncated` (true if any of its turns was). With `sampler.record_experts`, also the `experts` of
        each token when its turn was drawn. Each sampled token is learnt in exactly one row. If several turns continue a
        turn, it is learnt in the first of their rows. In the others it counts as prompt, with log-prob 0 and version
        -1.
        """
        return self._rows(list(self._firsts))

    def _rows(self, turns: Sequence[Turn]) -> Batch:
        learned = set(self._learned)
        paths = [turn.path() for turn in turns if turn in self._transcripts]
        rows = [_token_columns(path, learned) for path in paths]
        texts = [(row["tokens"].tolist(), len(path[0].added)) for row, path in zip(rows, paths, strict=True)]
        experts = [[turn.drawn.experts for turn in path if turn.drawn.experts is not None] for path in paths]
        recorded = [np.concatenate(each) for each in experts if each]
        versions = [row["versions"][np.flatnonzero(row["loss_mask"])] for row in rows]
        more: dict[str, Ragged | Images | list[tuple[str, ...]]] = {}
        if recorded:
            more["experts"] = Ragged.of(recorded, np.int16, source=Source("sampler"))
        if self._sees:
            names = [_named(each.message for each in path[-1].history()) for path in paths]
            more[IMAGES] = Images(names, {name: file for path in paths for name, file in path[-1].pool().items()})
            made = [tuple(path[-1].drawn.fingerprints or ()) for path in paths]
            if list(map(len, made)) == list(map(len, names)):
                more[FINGERPRINTS] = made
        return Batch.of(
            **more,
            prompt=[self._chat.decode(tokens[:begin]) for tokens, begin in texts],
            completion=[self._chat.decode(tokens[begin:], tokens[:begin]) for tokens, begin in texts],
            **ragged_columns(rows),
            turn=Ragged.of([row["turn"] for row in rows], np.int32),
            masked=[_masked(path, row["turn"]) for path, row in zip(paths, rows, strict=True)],
            oldest_version=np.array([each.min() for each in versions], np.int32),
            temperature=np.array([path[-1].drawn.temperature for path in paths], np.float32),
            truncated=np.array([any(turn.drawn.truncated for turn in path) for path in paths], np.bool_),
        )

    @property
    def _sees(self) -> bool:
        return isinstance(self._chat, SeeingChat) and self._chat.sees

    def _followed(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[bytes, list[Meaning], dict[int, Turn], bool]:
        """Follow the recorded turns with which a history begins.

        Returns the history's key, its messages with answers as the model gave them, these turns by the number of
        messages that each ends, and whether an answer was not given there or is left out.
        """
        key, heard, turns, is_changed = key_after(b"", list(tools)), list[Meaning](), dict[int, Turn](), False
        for sent in meanings_of(messages):
            new, answers = [sent], self._by_key.get(key, ())
            if sent.role != "assistant":
                is_changed |= bool(answers)
            else:
                rests = [(turn, added_to(turn.heard[-1], sent, turn.unseen)) for turn in reversed(answers)]
                given = [(turn, rest) for turn, rest in rests if rest is not None and _follows(turn, heard, turns)]
                is_changed = not given
                for turn, rest in sorted(given, key=lambda each: each[0].heard[-1].ids != sent.ids)[:1]:
                    turns[len(heard) + 1] = turn
                    new = [sent.as_said(turn.heard[-1]), *meanings_of([Message("assistant", rest)] if rest else [])]
            for each in new:
                heard.append(each)
                key = key_after(key, each.gist)
        return key, heard, turns, is_changed

    def _put_back(self, heard: list[Meaning], turns: Mapping[int, Turn]) -> set[str]:
        """Put dropped thoughts back into the answers of a history that branches. Returns their gists."""
        said = defaultdict[str, list[Meaning]](list)
        for turn in self._firsts:
            for answer in turn.heard[-1:]:
                said[answer.gist].append(answer)
        known = [at for at, each in enumerate(heard) if each.gist in said]
        for at in reversed(known):  # what was said twice is put back in its order
            answer = said[heard[at].gist].pop() if said[heard[at].gist] else heard[at]
            if at + 1 not in turns and difference(answer, heard[at]) is None:
                heard[at] = heard[at].as_said(answer)
        return {heard[at].gist for at in known}

    def _log_change(
        self, heard: Sequence[Meaning], turns: Mapping[int, Turn], tools: Sequence[Tool], answers: set[str]
    ) -> None:
        """Log what was changed in a history that branches. `answers`: the gists of its answers."""
        gists = [each.gist for each in heard]
        found: tuple[tuple[int, int], Turn, Sequence[Meaning]] | None = None
        leaves = [leaf for leaf in reversed(self._transcripts) if leaf.heard]
        ended = [leaf for leaf in leaves if leaf.heard[-1].gist in answers]
        for leaf in (*leaves[:_COMPARED], *ended[:_COMPARED]):
            recorded = leaf.history()
            old = [each.gist for each in recorded]
            likeness = _shared(old, gists), len(answers.intersection(old))
            if found is None or likeness > found[0]:
                found = likeness, leaf, recorded
        if found is None:
            return
        (_, is_known), leaf, recorded = found
        same = _shared(recorded, heard, difference)
        ends = list(itertools.accumulate(len(turn.heard) for turn in leaf.path()))
        offered = [json.dumps(list(each), sort_keys=True) for each in (self._transcripts[leaf].tools, tools)]
        differing = zip(recorded[same:], heard[same:], strict=False)
        name, before, after = next((difference(*pair) for pair in differing), None) or ("tools", *offered)
        if before == after or not (is_known or same + 1 in ends):
            return  # a sub-agent, or another try
        number = next(self._changes)
        if number <= _LOGGED or number & (number - 1) == 0:
            log.info(
                f"a client changed its history (change {number}): a new row begins",
                turn=leaf.path()[min(bisect(ends, same), len(ends) - 1)].number,
                role=recorded[min(same, len(recorded) - 1)].role,
                field=name,
                before=_around(before, after),
                after=_around(after, before),
            )

    def _behind(
        self, messages: Sequence[Message], end: int, tools: Sequence[Tool], turn: Turn, images: Mapping[str, bytes]
    ) -> Ints | None:
        """Ids that the template puts after a turn, which ends `messages[:end]`. None if they cannot be determined.

        A mark replaces the answer, because the template may format the answer itself.
        """
        mark, sent = _MARK, json.dumps([message.shown() for message in messages])
        while mark in sent:
            mark += "-"
        try:
            text = self._rendered(_marked(messages, end, Message("assistant", mark)), tools, images)
        except DataError:
            return self._behind_call(messages, end, tools, turn, images, mark)
        # If the template repeats or changes the mark, the text after it is unknown.
        return self._encoded(text.partition(mark)[2], turn) if text.count(mark) == 1 else None

    def _behind_call(
        self,
        messages: Sequence[Message],
        end: int,
        tools: Sequence[Tool],
        turn: Turn,
        images: Mapping[str, bytes],
        mark: str,
    ) -> Ints | None:
        """As `_behind`, for a template that refuses a tool's answer without a call: with the mark in a call.

        What belongs to the call ends with the token that ended the answer.
        """
        calls = [
            msgspec.structs.replace(call, function=Function(call.function.name, json.dumps({"mark": mark})))
            for call in messages[end - 1].tool_calls
        ]
        last = turn.drawn.tokens[-1]
        if not calls or last not in self._chat.ends:
            return None
        try:
            text = self._rendered(_marked(messages, end, Message("assistant", tool_calls=tuple(calls))), tools, images)
        except DataError:
            return None
        behind = self._encoded(text.rpartition(mark)[2], turn)
        places = np.flatnonzero(behind == last)
        return behind[places[0] :] if text.count(mark) == len(calls) and len(places) else None

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool], images: Mapping[str, bytes]) -> str:
        """Render messages, without special tokens in answers if the template refuses those."""
        try:
            return self._shown(messages, tools, images)
        except DataError:
            plain = [msgspec.structs.replace(each, content=without_special(each.content)) for each in messages]
            if plain == list(messages):
                raise
            return self._shown(plain, tools, images)

    def _shown(self, messages: Sequence[Message], tools: Sequence[Tool], images: Mapping[str, bytes]) -> str:
        said = [unmarked(each.content) if each.role == "assistant" else each.content for each in messages]
        plain = [msgspec.structs.replace(each, content=text) for each, text in zip(messages, said, strict=True)]
        if not images:
            return self._chat.render(plain, tools)
        if not isinstance(self._chat, SeeingChat):
            raise DataError("the messages have images, and this model's chat takes texts alone")
        return self._chat.render_seeing(plain, tools, images)

    def images_of(self, prompt: Prompt) -> Images:
        """Return the images of a prompt, a column of one row."""
        return Images([_named(prompt.messages)], prompt.images)

    def _continued(self, turn: Turn, behind: Ints, asked: bytes | str) -> Prompt:
        last = turn.drawn.tokens[-1]
        if last in self._chat.ends and len(behind) and behind[0] == last:
            behind = behind[1:]  # the sampler has already ended the turn
        return Prompt(np.concatenate([turn.tokens(), behind]), turn, behind, asked)

    def _encoded(self, text: str, turn: Turn | None = None) -> Ints:
        return np.array(self._chat.encode(text, turn.drawn.tokens.tolist() if turn else ()), np.int32)


def _marked(messages: Sequence[Message], end: int, answer: Message) -> Sequence[Message]:
    """Messages with another answer in place of that before `end`."""
    return [*messages[: end - 1], answer, *messages[end:]]


def _named(messages: Iterable[Message]) -> list[str]:
    """Return the names of the images in messages, in order. A model's own words name none."""
    return [name for each in messages if each.role != "assistant" for name in names_in(each.content)]


def _follows(turn: Turn, heard: Sequence[Meaning], turns: Mapping[int, Turn]) -> bool:
    """True if the messages before the turn's answer, whose gists are the same, mean the same."""
    known = turn.before is None or turn.before in turns.values()
    before = (turn.heard if known else turn.history())[:-1]
    return _shared(before, heard[len(heard) - len(before) :], difference) == len(before)


def _shared(recorded: Sequence[T], sent: Sequence[T], differ: Callable[[T, T], object] = ne) -> int:
    """Number of items, such as messages, with which both begin."""
    pairs = enumerate(zip(recorded, sent, strict=False))
    return next((at for at, pair in pairs if differ(*pair)), min(len(recorded), len(sent)))


def _around(text: str, other: str) -> str:
    """The part of a text where it begins to differ from the other."""
    at = _shared(text, other)
    begin = max(0, at - 20)
    return f"{'...' if begin else ''}{text[begin : at + 40]}{'...' if len(text) > at + 40 else ''}"


def ragged_columns(rows: Sequence[Mapping[str, ArrayLike]]) -> Mapping[str, Ragged]:
    """Make the standard token columns of rows, each a table of them."""
    sources = {"sampler_logprobs": Source("sampler")}
    return {
        name: Ragged.of([row[name] for row in rows], dtype, source=sources.get(name))
        for name, dtype in PER_TOKEN.items()
    }


def _token_columns(path: Sequence[Turn], learned: set[Turn]) -> Mapping[str, Array]:
    """Return the token columns of a path's row, and add its turns to those that are learnt."""
    parts: dict[str, list[Array]] = {name: [] for name in (*PER_TOKEN, "turn")}
    for turn in path:
        new, drawn = turn not in learned, turn.drawn
        before, size = len(turn.added), len(drawn.tokens)
        parts["tokens"] += [turn.added, drawn.tokens]
        for name, values, other in (
            ("loss_mask", np.ones(size, np.bool_), False),
            ("sampler_logprobs", drawn.logprobs, 0),
            ("versions", drawn.versions, -1),
            ("turn", np.full(size, turn.number, np.int32), -1),
        ):
            parts[name] += [np.full(before, other, values.dtype), values if new else np.full(size, other, values.dtype)]
    learned.update(path)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _masked(path: Sequence[Turn], numbers: Array) -> str | None:
    """The spans of a row's learnt tokens that were drawn under a mask, given the turn of each token."""
    spans = list[Span]()
    for turn in path:
        places = np.flatnonzero(numbers == turn.number)
        if turn.drawn.mask is not None and len(places):
            spans.append((int(places[0]), int(places[-1]) + 1, turn.drawn.mask))
    return masked_text(spans)


def _keys_of(text: str, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Keys of the text's beginnings with these lengths, in the order of the lengths."""
    digest, read = hashlib.blake2b(digest_size=16, person=b"text"), 0
    for length in lengths:
        digest.update(text[read:length].encode(errors="surrogatepass"))
        read = length
        yield length, digest.digest()
