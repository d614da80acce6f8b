"""The ids that are trained on are the ids that were sampled, after the ids that they were sampled after."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest

from meshrl import Batch
from meshrl.agents import Conversation, Drawn, Function, Message, Prompt, Tool, ToolCall
from meshrl.data import Source
from meshrl.errors import DataError
from tests.agents.conftest import ShownChat

USER = Message("user", "the cat?")
TOOL: Tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def drawn(tokens: Sequence[int], version: int = 0, truncated: bool = False) -> Drawn:
    logprobs = np.linspace(-1, -2, len(tokens), dtype=np.float32)
    return Drawn(np.array(tokens, np.int32), logprobs, np.full(len(tokens), version, np.int32), 1.0, truncated)


def wrote(chat: ShownChat, text: str) -> Drawn:
    (end,) = chat.ends
    return drawn([*chat.encode(text), end])


def turn(conversation: Conversation, chat: ShownChat, messages: Sequence[Message], text: str) -> list[Message]:
    said = Message("assistant", text)
    conversation.answer(conversation.ask(messages), wrote(chat, text), said)
    return [*messages, said]


def test_a_prompt_reads_as_the_template_has_the_whole(each_chat: ShownChat) -> None:
    chat = each_chat
    conversation = Conversation(chat)
    messages = turn(conversation, chat, [Message("system", "be brief"), USER], "on the mat")
    messages = turn(conversation, chat, [*messages, Message("user", "why?")], "it sat")
    asked = conversation.ask([*messages, Message("user", "and then?")])
    assert chat.shown(asked.tokens) == chat.render([*messages, Message("user", "and then?")], ())
    assert asked.before is not None
    assert len(conversation.rows()) == 1

    cut, said = Conversation(chat), Message("assistant", "the c")
    cut.answer(cut.ask([USER]), drawn(chat.encode("the c"), truncated=True), said)
    asked = cut.ask([USER, said, Message("user", "go on")])
    assert chat.shown(asked.tokens) == chat.render([USER, said, Message("user", "go on")], ())
    assert cut.rows().row("truncated").tolist() == [True]
    cut.answer(asked, drawn(chat.encode("at sat")), Message("assistant", "at sat"))
    assert cut.rows().row("truncated").tolist() == [True]


def test_a_row_has_its_source_texts_for_people_and_the_one_temperature_of_its_turns(chat: ShownChat) -> None:
    conversation, said = Conversation(chat), Message("assistant", "on")
    conversation.answer(conversation.ask([USER]), replace(wrote(chat, "on"), temperature=0.5), said)
    rows = conversation.rows()
    assert rows.source("sampler_logprobs") == Source("sampler")
    assert str(rows.objects("prompt")[0]).strip().endswith("the cat?<|start_header_id|>assistant<|end_header_id|>")
    assert str(rows.objects("completion")[0]).startswith("on")
    assert rows.row("temperature").tolist() == [0.5]
    with pytest.raises(DataError, match=r"drawn at temperature 0\.5 and this one at 1"):
        conversation.answer(conversation.ask([USER, said, USER]), wrote(chat, "mat"), said)


def test_a_rewritten_history_other_tools_and_a_template_that_refuses_branch(chat: ShownChat) -> None:
    edits: list[list[Message]] = [
        [Message("system", "another"), USER],
        [Message("user", "the dog?")],
        [USER, Message("assistant", "on a mat"), USER],
        [USER, USER],
    ]
    for edited in edits:
        conversation = Conversation(chat)
        messages = turn(conversation, chat, [USER], "on the mat")
        assert conversation.ask(edited).before is None
        turn(conversation, chat, edited, "no")
        rows = conversation.rows()
        assert len(rows) == 2
        assert chat.shown(rows.tokens[1]).startswith(chat.render(edited, ()))
        assert conversation.ask([*messages, USER], [TOOL]).before is None
        assert conversation.ask([*messages, USER]).before is not None

    conversation = Conversation(chat)
    said = Message("assistant", "", tool_calls=(ToolCall(id="c", function=Function("add", "{}")),))
    conversation.answer(conversation.ask([USER]), wrote(chat, "call"), said)
    assert conversation.ask([USER, said, Message("tool", "3")]).before is None, "the template refuses a stand-in"


def test_calls_in_other_spaces_and_thoughts_stay_as_they_were_sampled(qwen: ShownChat) -> None:
    conversation = Conversation(qwen)
    written = '<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>'
    said = Message("assistant", "", tool_calls=(ToolCall(id="c1", function=Function("add", '{"a":1,"b":2}')),))
    conversation.answer(conversation.ask([USER], [TOOL]), wrote(qwen, written), said)
    spaced = Message("assistant", "", tool_calls=(ToolCall(id="c1", function=Function("add", '{"b": 2, "a": 1}')),))
    asked = conversation.ask([USER, spaced, Message("tool", "3", tool_call_id="c1")], [TOOL])
    assert asked.before is not None
    shown = qwen.shown(asked.tokens)
    assert written in shown
    assert shown.endswith("\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")

    conversation = Conversation(qwen)
    messages = turn(conversation, qwen, [USER], "<think>\nhm\n</think>\n\non")
    asked = conversation.ask([*messages, USER])
    assert "hm" in qwen.shown(asked.tokens)
    assert "hm" not in qwen.render([*messages, USER], ())


def test_texts_without_messages(chat: ShownChat) -> None:
    conversation = Conversation(chat)
    asked = conversation.ask_text("the cat ")
    odd = [token for letter in "sat on" for token in chat.encode(letter)]
    conversation.answer(asked, drawn(odd), "sat on")
    longer = conversation.ask_text("the cat sat on the mat")
    assert longer.tokens.tolist() == [*chat.encode("the cat "), *odd, *chat.encode(" the mat")]
    assert conversation.ask_text("the cat sat o").before is None
    assert len(conversation.rows()) == 1


def test_the_text_that_stopped_an_answer_is_not_doubled_by_a_client_that_writes_it(chat: ShownChat) -> None:
    conversation = Conversation(chat)
    stopped = drawn(chat.encode(" the cat\nmat:"))
    for said, behind in ((" the cat", "\nmat: sat"), ("", " the cat\nmat: sat"), (" the cat", "\nthe mat")):
        told = f"on {said} {behind}"
        conversation.answer(conversation.ask_text(told), stopped, said)
        asked = conversation.ask_text(told + said + behind)
        assert asked.before is not None
        kept = "\nthe mat" if "the mat" in behind else " sat"
        assert asked.added.tolist() == chat.encode(kept)


def test_a_text_that_ends_where_an_answer_does_is_another_try_unless_that_was_cut_short(chat: ShownChat) -> None:
    for said, truncated in (("", False), ("on", False), ("on", True)):
        conversation = Conversation(chat)
        answer = drawn(chat.encode(said), truncated=True) if truncated else wrote(chat, said)
        conversation.answer(conversation.ask_text("the cat "), answer, said)
        asked = conversation.ask_text(f"the cat {said}")
        assert (asked.before is not None) == truncated
        assert truncated or asked.tokens.tolist() == chat.encode(f"the cat {said}")


def test_a_conversation_that_is_taken_leaves_the_others(chat: ShownChat) -> None:
    conversation = Conversation(chat)
    messages = turn(conversation, chat, [USER], "on")
    for text in ("the", "the cat"):
        conversation.answer(conversation.ask_text(text), wrote(chat, " sat"), " sat")
    turn(conversation, chat, [*messages, USER], "the mat")
    spoken, short, long = conversation.sizes().items()
    assert (spoken[1], short[1], long[1]) == (2, 1, 1)
    rows, (transcript,) = conversation.take(long[0])
    assert (len(rows), transcript.prompt) == (1, "the cat")
    assert conversation.sizes() == dict([spoken, short])
    assert conversation.ask_text("the cat sat on").before is None
    assert conversation.ask_text("the sat on").before is short[0]
    assert len(conversation.take(spoken[0])[0]) == len(conversation.rows()) == 1
    assert conversation.ask([*messages, USER]).before is None


def test_what_is_no_turn_is_refused(chat: ShownChat) -> None:
    conversation = Conversation(chat)
    with pytest.raises(DataError, match="there are no messages"):
        conversation.ask([])
    with pytest.raises(DataError, match="at least one token"):
        conversation.answer(conversation.ask([USER]), drawn([]), USER)
    with pytest.raises(DataError, match="answered by a Message"):
        conversation.answer(conversation.ask([USER]), drawn([1]), "text")
    with pytest.raises(DataError, match="ud83d"):
        conversation.ask([Message("user", "\ud83d")])
    call = ToolCall(function=Function("add", "no JSON"))
    with pytest.raises(DataError, match=r"template refuses these messages: .*one call at a time"):
        conversation.ask([USER, Message("assistant", tool_calls=(call, call))])
    assert len(conversation.rows()) == 0


PIECES = (
    " ", "  ", "\n", "\n\n ", "the cat", "<|im_end|>", "<|eot_id|>", "<|im_start|>user\n", "</think>", "🦊", "日", "é",
)  # fmt: skip


def text_of(random: Random, least: int = 0) -> str:
    return "".join(random.choices(PIECES, k=random.randint(least, 4)))


class Client:
    def __init__(self, chat: ShownChat, seed: int) -> None:
        self.chat, self.random, self.conversation = chat, Random(seed), Conversation(chat)
        self.histories: list[list[Message]] = []
        self.sampled: dict[float, tuple[int, int, list[int]]] = {}
        """By its log-prob, which no other has: each token, its version, and all before it."""

    def turn(self) -> None:
        random = self.random
        kept = bool(self.histories) and random.random() < 0.5
        history = list(random.choice(self.histories)) if self.histories else []
        if history and not kept:
            history = self.edited(history)
        role = "user" if history else random.choice(["user", "system"])
        messages = [*history, Message(role, text_of(random))]
        prompt = self.conversation.ask(messages)
        assert (prompt.before is not None) >= kept
        for _ in range(random.randint(1, 2)):
            tokens = self.sample(prompt)
            said = Message("assistant", self.chat.decode(tokens.tokens.tolist()))
            self.conversation.answer(prompt, tokens, said)
            # As a client has it that reads JSON and writes it.
            self.histories.append([*messages, msgspec.json.decode(msgspec.json.encode(said), type=Message)])

    def edited(self, history: list[Message]) -> list[Message]:
        at = self.random.randrange(len(history))
        before, after = history[:at], history[at + 1 :]
        text = self.random.choice([history[at].content.strip(), text_of(self.random)])
        return self.random.choice([before, before + after, [*before, Message(history[at].role, text), *after]])

    def sample(self, prompt: Prompt) -> Drawn:
        """Any ids: a text in pieces that no tokenizer makes, halves of letters, special tokens."""
        random = self.random
        by_letters = [token for each in text_of(random, least=1) for token in self.chat.encode(each)]
        anything = random.choices(range(400), k=random.randint(1, 6))
        ids = random.choice([anything, by_letters[: random.randint(1, len(by_letters))]])
        if random.random() < 0.5:
            ids += self.chat.ends
        marks = np.arange(len(self.sampled), len(self.sampled) + len(ids), dtype=np.int32)
        for at, (token, mark) in enumerate(zip(ids, marks.tolist(), strict=True)):
            self.sampled[-float(mark)] = token, mark // 4, [*prompt.tokens.tolist(), *ids[:at]]
        return Drawn(np.array(ids, np.int32), -marks.astype(np.float32), marks // 4, 1.0)


def learnt(rows: Batch) -> dict[float, tuple[int, int, list[int]]]:
    found: dict[float, tuple[int, int, list[int]]] = {}
    for tokens, mask, logprobs, versions in zip(
        rows.tokens, rows.loss_mask, rows.sampler_logprobs, rows.versions, strict=True
    ):
        given = ~np.asarray(mask, np.bool_)
        assert not logprobs[given].any()
        assert {*versions[given].tolist()} <= {-1}
        for at in np.flatnonzero(mask).tolist():
            assert float(logprobs[at]) not in found, "a token is learnt twice"
            found[float(logprobs[at])] = int(tokens[at]), int(versions[at]), tokens[:at].tolist()
    return found


@pytest.mark.parametrize("count", [200, pytest.param(3400, marks=pytest.mark.wide)])
def test_what_is_trained_on_is_what_was_sampled(each_chat: ShownChat, count: int) -> None:
    for seed in range(count):
        client = Client(each_chat, seed)
        for _ in range(client.random.randint(1, 5)):
            client.turn()
        rows = client.conversation.rows()
        assert learnt(rows) == client.sampled
        oldest = [min(version for version in versions.tolist() if version >= 0) for versions in rows.versions]
        assert rows.row("oldest_version").tolist() == oldest
