"""The ids that are trained on are the ids that were sampled, after the ids that they were sampled after."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from meshrl import Batch
from meshrl.agents import Conversation, Drawn, Function, Message, Prompt, Tool, ToolCall
from meshrl.data import Source
from meshrl.errors import DataError
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.text import Words

LLAMA = """{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

Functions: {{ tools | tojson }}<|eot_id|>{% endif %}{% for message in messages %}\
{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('nobody called') }}\
{% endif %}<|start_header_id|>\
{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}\
{% endif %}{{ message.tool_calls[0].function | tojson }}{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>\
{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

QWEN = """{%- if messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- set last = namespace(query=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}\
{%- if message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\
{%- endif %}{{ '\n' }}<tool_response>
{{ message.content }}
</tool_response>{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{% if loop.index0 > last.query %}<think>
{{ message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' }}
</think>

{% endif %}{{ said }}{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SHAPES = {"llama": (LLAMA, "<|eot_id|>"), "qwen": (QWEN, "<|im_end|>")}
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class ShownChat(HuggingFaceChat):
    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self.words = words

    def shown(self, tokens: Any) -> str:
        return str(self.words.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))


@cache
def chat_of(shape: str) -> ShownChat:
    """A tokenizer of bytes and some words, as GPT-2's: an emoji is four tokens, and a text has many tokenisations."""
    template, end = SHAPES[shape]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and the assistant said hello to the user"] * 8, trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token=end, clean_up_tokenization_spaces=False
    )
    whole.chat_template = template
    ends: Any = whole.convert_tokens_to_ids(end)
    return ShownChat(Words(whole, None, frozenset({ends}), 4096, known=len(whole)))


@pytest.fixture(scope="session")
def chat() -> ShownChat:
    """Of the shape that puts a token before the first message, and wants a call before a tool's answer."""
    return chat_of("llama")


@pytest.fixture(scope="session")
def qwen() -> ShownChat:
    """Of the shape that leaves out the thoughts of earlier turns, and shows a tool's answer as the user's."""
    return chat_of("qwen")


@pytest.fixture(scope="session", params=SHAPES)
def each_chat(request: pytest.FixtureRequest) -> ShownChat:
    return chat_of(request.param)


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


def test_a_template_that_refuses_a_stand_in_text_gets_a_stand_in_call(chat: ShownChat) -> None:
    said = Message("assistant", "", tool_calls=(ToolCall(id="c", function=Function("add", "{}")),))
    for is_cut in (False, True):
        conversation, drawn = Conversation(chat), wrote(chat, "call")
        if is_cut:  # nothing says where the answer ends in the template
            kept = {name: getattr(drawn, name)[:-1] for name in ("tokens", "logprobs", "versions")}
            drawn = replace(drawn, **kept)
        asked = conversation.ask([USER])
        conversation.answer(asked, drawn, said)
        prompt = conversation.ask([USER, said, Message("tool", "3")])
        assert (prompt.before is None) == is_cut
        if not is_cut:
            behind = "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|><|start_header_id|>assistant"
            assert prompt.tokens.tolist()[: len(asked.tokens)] == asked.tokens.tolist()
            assert chat.shown(prompt.tokens[len(asked.tokens) :]).startswith(f"call<|eot_id|>{behind}")


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


@pytest.mark.parametrize("edit", [0, -2])
def test_a_history_that_always_branches_costs_no_more_after_many_rows(edit: int, chat: ShownChat) -> None:
    conversation, calls = Conversation(chat), list[int]()
    messages = [USER] * 6
    for number in range(100):
        messages[edit] = Message("user", f"the cat {number}?")
        calls.append(0)

        def count(_: object, event: str, __: object) -> None:
            calls[-1] += event == "call"

        sys.setprofile(count)
        prompt = conversation.ask(messages)
        sys.setprofile(None)
        said = Message("assistant", f"on mat {number}")
        conversation.answer(prompt, wrote(chat, said.content), said)
        messages = [USER, *messages[-3:], said, Message("user", "why?")]
    assert len(conversation.rows()) == 100
    assert max(calls[80:]) < 1.5 * max(calls[40:50])
