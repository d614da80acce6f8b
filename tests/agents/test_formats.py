"""Calls and thoughts in the forms of families: clients read what was written, and what is learned was drawn.

The templates are short, and write calls and results as the families' own do.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from jsonschema import validate
from tokenizers import AddedToken

from meshrl.agents import Conversation, Drawn, Function, Message, ToolCall
from meshrl.agents.chat import message_of
from meshrl.agents.formats import calls_in
from meshrl.agents.meaning import pieces_of
from meshrl.agents.protocol import Asked
from meshrl.data import Constraint
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.masks import grammars_of
from tests.real_rows.shapes import Shape

Call: TypeAlias = tuple[str, dict[str, Any]]
CHATML = ("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_end|>")


@dataclass(frozen=True, eq=False)
class Family:
    name: str
    turn: tuple[str, str, str]
    """What is before and after a message, and the token that ends an answer."""
    writes: Callable[[Sequence[Call]], str]
    """The calls of an answer as the model writes them."""
    calls: str
    """The calls of an answer in the template: `calls`, each with `function` and `id`."""
    specials: Sequence[str] = ()
    thought: tuple[str, str] = ("<think>", "</think>")
    opened: str = ""
    """What the template writes of an answer."""
    final: str = ""
    """What precedes the text of an answer."""

    call_end: str = ""
    """The token that ends an answer with calls, if that is another."""

    closes: str = ""
    """What the template puts after an answer, if not what it puts after all messages."""
    is_strict: bool = False
    """True if the template refuses a tool's message without a call before it."""

    @property
    def template(self) -> str:
        before, after, _ = self.turn
        role = before.replace("{role}", "{{ m.role }}")
        final = f"{{% if not m.tool_calls %}}{self.final}{{% endif %}}"
        said = f"{final}{{{{ m.content }}}}{{% set calls = m.tool_calls %}}{{% set ns.called = calls %}}"
        ends, closes = self.call_end if self.call_end == "<|call|>" else after, self.closes or after
        called = f"{{% if calls %}}{self.calls}{ends}{{% else %}}{closes}{{% endif %}}"
        refused = "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}"
        opens = f"{{% if add_generation_prompt %}}{before.replace('{role}', 'assistant')}{self.opened}{{% endif %}}"
        return (
            "{% set ns = namespace(called=false) %}{% if tools %}{{ tools | tojson }}{% endif %}"
            f"{{% for m in messages %}}{role}{{% if m.role == 'assistant' %}}{said}{called}"
            f"{{% else %}}{refused * self.is_strict}{{{{ m.content }}}}{after}{{% endif %}}{{% endfor %}}{opens}"
        )


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: object) -> str:
    return value if isinstance(value, str) else dumped(value)


def each(form: Callable[[str, dict[str, Any], int], str], before: str = "", after: str = "") -> Any:
    return lambda calls: before + "".join(form(name, given, at) for at, (name, given) in enumerate(calls)) + after


def hermes(name: str, given: dict[str, Any], at: int) -> str:
    return f'{chr(10) * (at > 0)}<tool_call>\n{{"name": "{name}", "arguments": {dumped(given)}}}\n</tool_call>'


def coder(name: str, given: dict[str, Any], at: int) -> str:
    inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
    return f"{chr(10) * (at > 0)}<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, given: dict[str, Any], at: int) -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in given.items())
    return f"\n<tool_call>{name}\n{inner}</tool_call>"


def minimax(name: str, given: dict[str, Any], at: int) -> str:
    inner = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in given.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def bars(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


DEEPSEEK = [bars(f"tool▁{each}") for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
KIMI = [
    f"<|tool_{each}|>"
    for each in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
]
HARMONY = [f"<|{each}|>" for each in ("start", "end", "message", "channel", "constrain", "return", "call")]


def deepseek3(name: str, given: dict[str, Any], at: int) -> str:
    return f"{DEEPSEEK[1]}function{DEEPSEEK[2]}{name}\n```json\n{dumped(given)}\n```{DEEPSEEK[3]}"


def deepseek31(name: str, given: dict[str, Any], at: int) -> str:
    return f"{DEEPSEEK[1]}{name}{DEEPSEEK[2]}{dumped(given)}{DEEPSEEK[3]}"


def kimi(name: str, given: dict[str, Any], at: int) -> str:
    return f"{KIMI[1]}functions.{name}:{at}{KIMI[2]}{dumped(given)}{KIMI[3]}"


def harmony(name: str, given: dict[str, Any], at: int) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(given)}"


LOOP, ENDLOOP = "{% for c in calls %}{% set f = c.function %}", "{% endfor %}"
JSON = "{{ f.arguments | tojson }}"
ITEMS = "{% for k, v in f.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
FAMILIES: Final = [
    Family(
        "Hermes", CHATML, each(hermes),
        f'{LOOP}\n<tool_call>\n{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}\n</tool_call>{ENDLOOP}',
    ),
    Family(
        "Llama 3", ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>"),
        lambda calls: f'{{"name": "{calls[0][0]}", "parameters": {dumped(calls[0][1])}}}',
        '{"name": "{{ calls[0].function.name }}", "parameters": {{ calls[0].function.arguments | tojson }}}',
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    Family(
        "Qwen3-Coder", CHATML, each(coder),
        f"{LOOP}\n<tool_call>\n<function={{{{ f.name }}}}>\n{ITEMS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n"
        f"{ENDLOOP}</function>\n</tool_call>{ENDLOOP}",
    ),
    Family(
        "DeepSeek-V3", (f"{bars('{role}')}", bars("end▁of▁sentence"), bars("end▁of▁sentence")),
        each(deepseek3, DEEPSEEK[0], DEEPSEEK[4]),
        f"{DEEPSEEK[0]}{LOOP}{DEEPSEEK[1]}function{DEEPSEEK[2]}{{{{ f.name + '\n```json\n' + f.arguments + '\n```' }}}}"
        f"{DEEPSEEK[3]}{ENDLOOP}{DEEPSEEK[4]}",
        [*DEEPSEEK, bars("user"), bars("assistant"), bars("tool")],
    ),
    Family(
        "DeepSeek-V3.1", (f"{bars('{role}')}", bars("end▁of▁sentence"), bars("end▁of▁sentence")),
        each(deepseek31, DEEPSEEK[0], DEEPSEEK[4]),
        f"{DEEPSEEK[0]}{LOOP}{DEEPSEEK[1]}{{{{ f.name + '{DEEPSEEK[2]}' + f.arguments }}}}{DEEPSEEK[3]}{ENDLOOP}"
        f"{DEEPSEEK[4]}",
        [*DEEPSEEK, bars("user"), bars("assistant"), bars("tool")],
    ),
    Family(
        "GLM-4.6", ("<|{role}|>\n", "", "<|user|>"), each(glm),
        f"{LOOP}\n<tool_call>{{{{ f.name }}}}\n{ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n"
        f"{ENDLOOP}</tool_call>{ENDLOOP}",
        ["<|assistant|>", "<|tool|>"], call_end="<|tool|>",
    ),
    Family(
        "Kimi-K2", ("<|im_{role}|>{role}<|im_middle|>", "<|im_end|>", "<|im_end|>"),
        each(kimi, KIMI[0], KIMI[4]),
        f"{KIMI[0]}{LOOP}{KIMI[1]}{{{{ c.id }}}}{KIMI[2]}{JSON}{KIMI[3]}{ENDLOOP}{KIMI[4]}",
        [*KIMI, "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_middle|>"],
    ),
    Family(
        "Mistral", ("[{role}]", "</s>", "</s>"),
        lambda calls: f"[TOOL_CALLS] {dumped([{'name': name, 'arguments': given} for name, given in calls])}",
        "[TOOL_CALLS] [{% for c in calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        '{{ (c.function | tojson)[:-1] + \', "id": "\' + c.id }}"}{% if not loop.last %}'
        ", {% endif %}{% endfor %}]",
        ["[TOOL_CALLS]", "[user]", "[assistant]", "[tool]"], ("[THINK]", "[/THINK]"),
    ),
    Family(
        "Mistral, Tekken 11", ("[{role}]", "</s>", "</s>"),
        each(lambda name, given, at: f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}"),
        f"{LOOP}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{JSON}{ENDLOOP}",
        ["[TOOL_CALLS]", "[ARGS]", "[user]", "[assistant]", "[tool]"], ("[THINK]", "[/THINK]"),
    ),
    Family(
        "gpt-oss", ("<|start|>{role}", "<|end|>", "<|return|>"),
        each(harmony),
        "<|channel|>commentary to=functions.{{ calls[0].function.name }} <|constrain|>json<|message|>"
        "{{ calls[0].function.arguments | tojson }}",
        HARMONY, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), final="<|channel|>final<|message|>",
        call_end="<|call|>", closes="{{ '<|return|>' if loop.last else '<|end|>' }}", is_strict=True,
    ),
    Family(
        "MiniMax-M2", ("]~b]{role}\n", "[e~[\n", "[e~["),
        each(minimax, "\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        f'\n<minimax:tool_call>\n{LOOP}<invoke name="{{{{ f.name }}}}">\n{ITEMS}<parameter name="{{{{ k }}}}">{VALUE}'
        f"</parameter>\n{ENDLOOP}</invoke>\n{ENDLOOP}</minimax:tool_call>",
        ["]~b]"], opened="<think>\n", is_strict=True,
    ),
]  # fmt: skip
ONE_CALL: Final = {"Llama 3", "gpt-oss"}
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "look": {"where": {"type": "string"}, "depth": {"type": "integer"}, "all": {"type": "boolean"}},
        "write-file.v2": {"path": {"type": "string"}, "parts": {"type": "array"}, "options": {"type": "object"}},
        "now": {},
    }.items()
]
WORDS: Final = [
    "the",
    " rain ",
    "\n",
    "ünï",
    "1",
    "true",
    '"',
    "\\",
    "{",
    "}",
    "</",
    "a>b",
    "日本",
    "🌍",
    "  ",
    ": ",
    "null",
    "'",
    "[",
]


@cache
def chat_of(family: Family) -> Any:
    end = family.turn[2]
    opening = ("<|im_start|>",) if end == "<|im_end|>" else ()
    more = tuple({each: None for each in (*family.specials, *opening) if each != end})
    ends = (family.call_end,) if family.call_end else ()
    shape = Shape(family.name, "bytes", family.template, end, None, more, ends=ends)
    tokenizer = shape.tokenizer()
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ("<tool_call>", "</think>", "</arg_value>")])
    return HuggingFaceChat(shape.words(tokenizer)), tokenizer


def text_of(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(0, most))).strip()


def value_of(draw: random.Random, kind: str) -> Any:
    values: dict[str, Callable[[], Any]] = {
        "string": lambda: text_of(draw, 5),
        "integer": lambda: draw.randint(-9, 10**12),
        "boolean": lambda: draw.random() < 0.5,
        "array": lambda: [text_of(draw, 2), draw.randint(0, 9), None, {"a": [1.5]}],
        "object": lambda: {text_of(draw, 2): text_of(draw, 3), "deep": {"er": [draw.random()]}},
    }
    return values[kind]()


def call_of(draw: random.Random) -> Call:
    function = draw.choice(TOOLS)["function"]
    properties = function["parameters"]["properties"]
    return function["name"], {
        k: value_of(draw, schema["type"]) for k, schema in properties.items() if draw.random() < 0.8
    }


def drawn_of(draw: random.Random, tokenizer: Any, text: str, end: str) -> Drawn:
    """A text as a model might draw it, in other pieces than a tokenizer makes of it."""
    names = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    added = sorted((str(each) for each in tokenizer.get_added_vocab()), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, [*names, *added])) + ")", text)
    ids = list[int]()
    for piece in filter(None, pieces):
        at = 0 if piece not in added else len(piece)
        ids += [tokenizer.convert_tokens_to_ids(piece)] if at else []
        while at < len(piece):
            size = draw.randint(1, 6)
            ids += tokenizer(piece[at : at + size], add_special_tokens=False)["input_ids"]
            at += size
    ids.append(tokenizer.convert_tokens_to_ids(end))
    logprobs = np.array([-draw.random() for _ in ids], np.float32)
    return Drawn(np.array(ids, np.int32), logprobs, np.full(len(ids), draw.randint(0, 5), np.int32), 1.0)


def spelled_again(draw: random.Random, said: Message) -> Message:
    """The message as clients send it back."""
    content, calls = said.content, list(said.tool_calls)
    if draw.random() < 0.5:
        content = "".join(piece for piece, is_thought in pieces_of(content) if not is_thought)
    if draw.random() < 0.5:
        content = f" {content.strip()}\n"
    if draw.random() < 0.5:
        given = [json.dumps(json.loads(call.function.arguments), sort_keys=True, indent=1) for call in calls]
        calls = [
            ToolCall(id=call.id, function=Function(call.function.name, text))
            for call, text in zip(calls, given, strict=True)
        ]
    return Message("assistant", content, tool_calls=tuple(calls))


def converse(seed: int) -> None:
    draw = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    chat, tokenizer = chat_of(family)
    conversation, numbers = Conversation(chat), iter(range(10**5))
    messages, ids, learned = [Message("user", text_of(draw, 6) or "hello")], list[int](), list[Drawn]()
    for _ in range(draw.randint(1, 4)):
        prompt = conversation.ask(messages, TOOLS)
        assert prompt.tokens[: len(ids)].tolist() == ids, "a prompt holds what was drawn"
        calls = [call_of(draw) for _ in range(draw.randint(0, 1 if family.name in ONE_CALL else 3))]
        begin, close = family.thought
        thought = text_of(draw, 4) if not calls or family.name != "Llama 3" else ""
        opened = begin if thought or family.opened else ""
        before = f"{opened}{thought}{close}" if opened and not family.opened else f"{thought}{close}" if opened else ""
        content = text_of(draw, 4).replace("{", "").strip() if not calls else ""
        text = before + (family.writes(calls) if calls else family.final + content)
        end = family.call_end if calls and family.call_end else family.turn[2]
        drawn = drawn_of(draw, tokenizer, text, end)
        heard = chat.decode(drawn.tokens.tolist(), prompt.tokens.tolist())
        said = message_of(heard, TOOLS, lambda: f"call{next(numbers):05}")
        read = [(call.function.name, json.loads(call.function.arguments)) for call in said.tool_calls]
        assert read == calls, (family.name, text)
        parts = pieces_of(said.content)
        assert "".join(piece for piece, is_thought in parts if not is_thought).strip() == content, (family.name, text)
        assert "".join(piece for piece, is_thought in parts if is_thought).strip() == thought, (family.name, text)
        conversation.answer(prompt, drawn, said)
        learned.append(drawn)
        ids = [*prompt.tokens.tolist(), *drawn.tokens.tolist()]
        messages.append(spelled_again(draw, said))
        messages += [Message("tool", text_of(draw, 5), tool_call_id=call.id) for call in said.tool_calls]
        messages += [] if calls else [Message("user", text_of(draw, 5) or "go on")]
    rows = conversation.rows()
    assert rows.tokens[0].tolist() == ids
    assert len(rows) == 1, "a row a conversation"
    mask = np.asarray(rows.loss_mask[0], np.bool_)
    for name in ("tokens", "sampler_logprobs", "versions"):
        wanted = [getattr(each, name.removeprefix("sampler_")) for each in learned]
        assert np.array_equal(rows.ragged(name)[0][mask], np.concatenate(wanted)), name


def test_what_is_learned_is_what_was_drawn() -> None:
    for seed in range(220):
        converse(seed)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_what_is_learned_is_what_was_drawn_in_ten_thousand_conversations() -> None:
    for seed in range(220, 10_220):
        converse(seed)


@pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
def test_a_call_that_cannot_be_read_stays_text(family: Family) -> None:
    text = family.writes([("look", {"where": "here", "depth": 1})])
    for part, other in (('"depth": 1', '"depth": '), ("</parameter>", ""), ("</arg_value>", "")):
        text = text.replace(part, other)
    said = message_of(f"so: {text}", TOOLS, lambda: "1")
    assert said.tool_calls == ()
    assert "so: " in said.content
    assert "here" in said.content


HERMES: Final = '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>'
OPTIONAL: Final = [
    {"function": {"name": "f", "parameters": {"properties": {"x": schema, "n": {"type": "number"}}}}}
    for schema in ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]})
]


def said(text: str, tools: Any = TOOLS, *, is_whole: bool = True) -> tuple[str, list[tuple[str, str]]]:
    ids = iter(range(99))
    message = message_of(text, tools, lambda: f"new{next(ids)}", is_whole=is_whole)
    return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>',
        "Write `<tool_call>NAME</tool_call>` please",
        f"{HERMES}<tool_call>now</tool_call>",
        '<tool_call>{"name": "look", "args": {"x": 1}}</tool_call>',
        "<tool_call><function=look><parameter=where>a</parameter><parameter=where>b</parameter></function></tool_call>",
        '<invoke name="look"></invoke>',
        '<minimax:tool_call><invoke name="NAME"></invoke></minimax:tool_call>',
        "<tool_call>look" + "<arg_key>where</arg_key><arg_value>a</arg_value>" * 40 + " oops</tool_call>",
        f"<think>I write {HERMES}</think>done",
    ],
)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    assert said(text) == (text, [])


def test_calls_come_after_thoughts() -> None:
    assert said(f"<think>maybe {HERMES}</think>{HERMES}") == (
        f"<think>maybe {HERMES}</think>",
        [("look", '{"where": "here"}')],
    )
    thought = "<|channel|>analysis<|message|>I call to=functions.look<|message|>{}<|end|>"
    assert said(f"{thought}<|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}<|call|>")[1] == [
        ("now", "{}")
    ]


def test_texts_about_channels_stay() -> None:
    text = "It writes <|channel|>analysis<|message|> before its thoughts"
    assert said(text) == (text, [])


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "Infinity", "{"])
def test_a_value_that_is_not_json_is_a_text(value: str) -> None:
    _, calls = said(f"<tool_call>look<arg_key>depth</arg_key><arg_value>{value}</arg_value></tool_call>")
    assert json.loads(calls[0][1]) == {"depth": value}


@pytest.mark.parametrize("tool", OPTIONAL)
def test_a_text_or_nothing_is_a_text(tool: Any) -> None:
    for value, read in (("1", "1"), ("true", "true"), ("null", None)):
        _, calls = said(f"<tool_call>f<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>", [tool])
        assert json.loads(calls[0][1]) == {"x": read}


def test_two_calls_have_two_ids() -> None:
    text = "".join(kimi(name, {}, 0) for name in ("now", "now"))
    ids = [call.id for call in message_of(text, TOOLS, lambda: "new").tool_calls]
    assert ids == ["functions.now:0", "new"]


@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("<tool_call>{", "}</tool_call>"),
        ("<tool_call>look<arg_key>a", "</tool_call>"),
        ("<tool_call><function=look><parameter=", "</function></tool_call>"),
        ('<minimax:tool_call><invoke name="look">', "</invoke></minimax:tool_call>"),
        ("<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        (f"{bars('tool▁call▁begin')}look{bars('tool▁sep')}", bars("tool▁call▁end")),
        ("[TOOL_CALLS]look[ARGS]{}", "{"),
        ("[TOOL_CALLS][", "]"),
        (" to=functions.look<|message|>", "<|call|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<parameter=", "<tool_call><function=look></function></tool_call>"),
        (" ", "<tool_call>{"),
        ("\n", "[TOOL_CALLS]look[ARGS]{"),
        ("a", "</tool_call><tool_call>"),
        ("</think>{", HERMES),
        ("</think><tool_call>{", HERMES),
        (HERMES, "</think>"),
    ],
)
def test_a_model_that_loops_costs_a_pass(opens: str, closes: str) -> None:
    many = opens * (200_000 // len(opens))
    for text in (many + closes, closes + many, f"{closes}{many}x</tool_call>"):
        message_of(text, TOOLS, lambda: "1")


KINDS: Final[list[Any]] = [
    {"type": "string"},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    {"enum": ["red", "</b>"], "type": "string"},
    {"type": ["string", "integer"], "maxLength": 4},
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "array", "items": {"$ref": "#/$defs/pair"}, "maxItems": 2},
    {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "required": ["deep"],
        "additionalProperties": False,
    },
    {"const": None},
]
CLOSERS: Final = [
    '"',
    "}",
    "]",
    "\n</parameter>\n",
    "</arg_value>\n",
    "</parameter>\n",
    "<tool_call>",
    "</think>",
    ", ",
]


def tool_of(draw: random.Random) -> Any:
    names = [f"p{number}" for number in range(draw.randint(0, 4))]
    properties = {name: draw.choice(KINDS) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    pair = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    parameters = {"type": "object", "properties": properties, "required": required, "$defs": {"pair": pair}}
    function = {"name": draw.choice(["seek", "read-file.v2", "do_it"]), "parameters": parameters}
    return {"type": "function", "function": {**function, "parameters": {**parameters, "additionalProperties": False}}}


def walked(draw: random.Random, chat: HuggingFaceChat, constraint: Constraint) -> list[int]:
    """Random tokens that a constraint allows, more often those that come to an end."""
    grammars = grammars_of(chat.words)
    matcher, ids = grammars.begin(constraint.text, (), "a row"), list[int]()
    closers = [chat.encode(each) for each in CLOSERS]
    while True:
        bits = np.unpackbits(grammars.fill([matcher])[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not chat.ends.isdisjoint(allowed):
            return ids
        closing = draw.choice(closers[: 9 if len(ids) < 200 else 6])
        fits = matcher.deep_copy().try_consume_tokens(list(closing)) == len(closing)
        piece = closing if fits and draw.random() < 0.3 + len(ids) / 300 else [draw.choice(allowed)]
        assert matcher.try_consume_tokens(list(piece)) == len(piece)
        ids += piece


def test_a_required_call_is_one_in_the_form_of_the_template() -> None:
    """Random schemas, and under each mask random tokens."""
    for seed in range(4 * len(FAMILIES)):
        draw = random.Random(seed)
        family = FAMILIES[seed % len(FAMILIES)]
        chat, tokenizer = chat_of(family)
        tool = tool_of(draw)
        name, schema = tool["function"]["name"], tool["function"]["parameters"]
        before = Message("assistant", tool_calls=(ToolCall(function=Function("now", "{}")),) * 3)
        constraint = Asked([before], None, [*TOOLS, tool], called=[name]).constraint(chat, "")
        assert constraint is not None
        chat.check(constraint)
        ids = walked(draw, chat, constraint)
        rest, calls = calls_in(text := chat.decode(ids), [tool])
        assert [name for name, _, _ in calls] == [name], (family.name, text)
        assert rest == "", (family.name, text)
        validate(json.loads(calls[0][1]), schema)
        form, added = chat.calls.named(name, 3), tokenizer.get_added_vocab().values()
        special = [each for each in chat.encode(form.begin + form.end) if each in added]
        assert [each for each in ids if each in special] == special, (family.name, text)
        assert calls[0][2] == {"Kimi-K2": f"functions.{name}:3", "Mistral": "000000003"}.get(family.name, "")


def test_a_call_may_have_marks_of_calls_in_its_texts() -> None:
    for family in FAMILIES:
        text = family.writes([("look", {"where": 'a "b"}</tool_call>'})])
        if chat_of(family)[0].calls.opens == "":
            assert said(text)[1] == [("look", dumped({"where": 'a "b"}</tool_call>'}))], family.name


@pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
def test_a_call_in_the_argument_of_another_is_not_one(family: Family) -> None:
    for other in FAMILIES:
        inner = other.writes([("now", {})])
        if chat_of(family)[0].calls.closes and "tool_call>" in inner:
            continue  # an argument without quotes cannot have the tags of its own form
        if other is family and family.name not in {"Llama 3", "Hermes"}:
            continue
        assert said(family.writes([("look", {"where": inner})]))[1] == [("look", dumped({"where": inner}))], other.name


def test_calls_within_one_that_cannot_be_read_stay_text() -> None:
    inner = "<tool_call><function=now></function></tool_call>"
    text = kimi("look", {"where": inner}, 0).replace(": ", " ")
    assert said(text) == (text, [])
    assert said(f"It is in <minimax:tool_call>a</minimax:tool_call>. {inner}")[1] == [("now", "{}")]


@pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
def test_an_argument_ends_no_thought(family: Family) -> None:
    begin, close = "<think>maybe <tool_call>", "</think>"
    for end in ("</think>", "[/THINK]", "◁/think▷", "<|channel|>analysis<|message|>"):
        text = family.writes([("look", {"where": f"a {end} b"})])
        for thought in ("", f"{begin}{close}", f"{HERMES}{close}", f"{begin}{HERMES}{close}"):
            content, calls = said(thought + text)
            assert calls == [("look", dumped({"where": f"a {end} b"}))], thought
            assert content == thought


@pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
def test_a_call_that_was_cut_has_no_other_in_its_argument(family: Family) -> None:
    """At every place of an argument that has a call of each form, after the end of a thought and without."""
    begin, close = family.thought
    for other in FAMILIES:
        if "tool_call>" in (inner := other.writes([("now", {})])) and chat_of(family)[0].calls.closes:
            continue  # as above
        for end in ("", "</think>"):
            text = family.writes([("look", given := {"where": f"a {end}{inner}"})])
            for before in ("", f"{begin}b{close}"):
                for cut in range(len(text) + 1):
                    _, calls = said(f"{before}{text[:cut]}", is_whole=False)
                    assert calls in ([], [("look", dumped(given))]), (other.name, before, text[:cut])
                    assert calls or cut < len(text), other.name


def test_a_thought_that_was_cut_has_no_calls() -> None:
    assert said(text := f"<think>I write {HERMES}", is_whole=False) == (text, [])
    assert said(f"{text}</think>{HERMES} and", is_whole=False)[1] == [("look", '{"where": "here"}')]
