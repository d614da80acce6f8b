"""How families of models write calls of tools and thoughts: each form of a call is found in the text that was drawn.

The forms have distinct marks, so a text needs no name of its family. What is learnt are the drawn tokens. The forms say
only what a client reads. To ask for a call, a model's own chat template is shown one, and what it writes must be one of
the forms.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product, takewhile
from operator import eq, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

Written: TypeAlias = tuple[str, str, str]
"""A call as it was written: the name of its function, its arguments in JSON, and its id, "" without one."""
Types: TypeAlias = Mapping[str, Mapping[str, object]]
"""The schemas of parameters by function and name, for forms that write texts without quotes."""
Reader: TypeAlias = Callable[["re.Match[str]", Types], Iterable[Written]]
"""Reads the calls that a pattern has matched. Raises ValueError if there is none."""


class Format(NamedTuple):
    """A form of calls."""

    families: str
    """Models that write it, for people."""
    mark: str
    """A text that every call has, so one that is left over could not be read."""
    begin: str
    """Begins every call, and nothing else. "" if only `call` finds them."""
    call: re.Pattern[str]
    """Matches a call, or several in a list. From one beginning, it takes time in proportion to the text."""
    read: Reader
    """Reads what was matched. Raises ValueError if it is no call."""
    around: re.Pattern[str] = re.compile(r"(?!)")
    """Matches marks around the calls, which no client sees."""
    is_plain: bool = False
    """True if a text may have the marks too, so that each call must name a tool that there is."""


class CallForm(NamedTuple):
    """How a chat template writes one call: what is before and after its arguments."""

    begin: str
    """With NAME for the function's name, and perhaps COUNT for the number of calls before."""
    end: str
    opens: str = ""
    """Before the name of each parameter, if these are between tags. "" if the arguments are one JSON object."""
    middle: str = ""
    """Between a parameter's name and its value."""
    closes: str = ""
    """After a value."""

    def named(self, name: str, count: int, keys: Sequence[str] = ()) -> "CallForm":
        """The form of a call of this function, after this number of calls. Raises ValueError if it could not be read.

        `keys`: the names of parameters.
        """
        if (most := max(map(len, (name, *keys)))) > _LONGEST:
            raise ValueError(f"a name of {name[:40]!r} or its parameters has {most} characters, more than {_LONGEST}")
        begin, end = (
            text.replace(NAME, name).replace(f":{COUNT}", f":{count}").replace(COUNT, f"{count:0{len(COUNT)}}")
            for text in (self.begin, self.end)
        )
        given = "".join(f"{self.opens}{key}{self.middle}1{self.closes}" for key in keys) if self.opens else "{}"
        _, calls = calls_in(f"{begin}{given}{end}", [{"function": {"name": name}}])
        wanted = dict.fromkeys(keys if self.opens else (), 1)
        if [(called, json.loads(read)) for called, read, _ in calls] != [(name, wanted)]:
            raise ValueError(f"a call of {name!r} would be written as {begin}{given}{end}, which cannot be read")
        return self._replace(begin=begin, end=end)


NAME: Final = "meshrlname"
COUNT: Final = "731852964"
"""Nine digits, as an id of Mistral's has."""
_LONGEST: Final = 256
"""Characters of a name."""


def _found(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")
    id: str = ""
    type: str = "function"


def _json(match: re.Match[str], types: Types) -> Iterable[Written]:  # noqa: ARG001 -- it has quotes
    """A JSON object with name and arguments, or a list of them."""
    told = msgspec.json.decode(match["json"], type=list[_Call] | _Call)
    for each in told if isinstance(told, list) else [told]:
        yield each.name, _object(bytes(each.arguments or each.parameters).decode() or "{}"), each.id


def _named(match: re.Match[str], types: Types) -> Iterable[Written]:  # noqa: ARG001 -- as above
    """A name, and arguments in JSON."""
    yield match["name"].strip(), _object(match["json"].strip() or "{}"), match.groupdict().get("id") or ""


def _object(text: str) -> str:
    msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return text


def _tagged(parameter: str) -> Reader:
    """A name, and each parameter between tags. Texts have no quotes there."""
    pattern = _found(r"\s*" + parameter)

    def read(match: re.Match[str], types: Types) -> Iterable[Written]:
        known, given = types.get(match["name"], {}), dict[str, object]()
        for each in _row_of(pattern, match["body"]):
            if each["key"] in given:
                raise ValueError(f"the parameter {each['key']!r} is there twice")
            given[each["key"]] = _typed(each["value"], known.get(each["key"]))
        yield match["name"], json.dumps(given, ensure_ascii=False), ""

    return read


def _listed(call: str, read: Reader) -> Reader:
    """Calls one after another."""
    pattern = _found(r"\s*" + call)
    return lambda match, types: [each for one in _row_of(pattern, match["body"]) for each in read(one, types)]


def _row_of(pattern: re.Pattern[str], text: str) -> Iterable[re.Match[str]]:
    """The matches that make up a text, with spaces between them. Raises ValueError if there is more."""
    at, text = 0, text.strip()
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 80]!r} cannot be read")
        yield match
        at = match.end()


def _typed(text: str, schema: object) -> object:
    """The value of a parameter: a text if the tool says so, or if it is not JSON."""
    if is_text(schema) and (text.strip() != "null" or _kinds(schema) == {"string"}):
        return text
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def is_text(schema: object) -> bool:
    """True if a parameter has no quotes where it is between tags: if its schema allows texts, and perhaps null."""
    return _kinds(schema) in ({"string"}, {"string", "null"})


def _kinds(schema: object) -> set[str]:
    """The types that a schema allows."""
    told: Mapping[str, Any] = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
    if isinstance(told.get("anyOf"), list):
        return {kind for each in told["anyOf"] for kind in _kinds(each) or {""}}
    kinds = told.get("type", [])
    return {str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}


def _bars(name: str) -> str:
    """A special token of DeepSeek's, between bars of full width."""
    return f"<\uff5ctool▁{name}\uff5c>"


_JSON: Final = r'(?P<json>(?:[^"]|"(?:[^"\\]|\\.)*+(?:"|\Z))*?)'
"""The shortest text before what follows, without ends in the midst of a quoted one."""
_NAME: Final = r"(?P<name>[\w.:-]++)"
FORMATS: Final[Sequence[Format]] = (
    Format(
        "Hermes, Qwen2.5, Qwen3",
        "</tool_call>",
        "<tool_call>",
        _found(rf"<tool_call>\s*(?=\{{){_JSON}(?<=\}})\s*</tool_call>"),
        _json,
    ),
    Format(
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        "</tool_call>",
        "<tool_call>",
        _found(rf"<tool_call>\s*<function={_NAME}>(?P<body>.*?)</function>\s*</tool_call>"),
        _tagged(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    Format(
        "GLM-4.5 and later",
        "</tool_call>",
        "<tool_call>",
        _found(rf"<tool_call>\s*{_NAME}(?P<body>.*?)</tool_call>"),
        _tagged(r"<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        is_plain=True,
    ),
    Format(
        "MiniMax-M2",
        "</minimax:tool_call>",
        "<minimax:tool_call>",
        _found("<minimax:tool_call>(?P<body>.*?)</minimax:tool_call>"),
        _listed(
            rf'<invoke name="{_NAME}">(?P<body>.*?)</invoke>',
            _tagged(r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'),
        ),
        is_plain=True,
    ),
    Format(
        "DeepSeek-V3, R1",
        _bars("call▁end"),
        _bars("call▁begin"),
        _found(f"{_bars('call▁begin')}function{_bars('sep')}{_NAME}\n```json\n{_JSON}\n```{_bars('call▁end')}"),
        _named,
        _found(_bars("calls▁(?:begin|end)")),
    ),
    Format(
        "DeepSeek-V3.1",
        _bars("call▁end"),
        _bars("call▁begin"),
        _found(f"{_bars('call▁begin')}{_NAME}{_bars('sep')}{_JSON}{_bars('call▁end')}"),
        _named,
        _found(_bars("calls▁(?:begin|end)")),
    ),
    Format(
        "Kimi-K2",
        "<|tool_call_end|>",
        "<|tool_call_begin|>",
        _found(
            r"<\|tool_call_begin\|>\s*(?P<id>functions\.(?P<name>[\w.-]+):\d+)\s*"
            rf"<\|tool_call_argument_begin\|>{_JSON}<\|tool_call_end\|>"
        ),
        _named,
        _found(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
    Format(
        "Mistral, Tekken 11 and later",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]",
        _found(rf"\[TOOL_CALLS\](?P<name>\w[\w.-]*)\[ARGS\](?=\{{){_JSON}(?<=\}})(?=\s*(?:\[TOOL_CALLS\]|\Z))"),
        _named,
    ),
    Format("Mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", _found(r"\[TOOL_CALLS\]\s*(?P<json>\[.*\])"), _json),
    Format(
        "gpt-oss",
        " to=functions.",
        "",
        _found(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.(?P<name>[\w.-]+)"
            rf"(?:<\|channel\|>(?:commentary|analysis))?(?: ?(?:<\|constrain\|>)?json)?<\|message\|>{_JSON}"
            r"(?:<\|call\|>|\Z)"
        ),
        _named,
    ),
)
"""The forms, in the order in which they are tried."""
_AROUND: Final = r"(?:\s|<\|[^<>|\s]*\|>|<\uff5c[^<>\uff5c\s]*\uff5c>)*+"
_BARE: Final = Format(
    "Llama 3",
    "{",
    "",
    _found(rf"\A{_AROUND}(?P<json>\{{.*\}}){_AROUND}\Z"),
    _json,
    is_plain=True,
)
"""Nothing but a call, of a tool that there is, perhaps between special tokens."""
_BARE_BEGIN: Final = _found(rf"{_AROUND}\{{")
_THOUGHT_END: Final = _found(
    r"[<◁]/think[>▷]|\[/THINK\]|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|(?=<\|start\|>)|\Z)"
)
_MARKS: Final = _found(
    rf"(?P<ends>{_THOUGHT_END.pattern})|(?P<opens>[<◁]think[>▷]|\[THINK\])"
    rf"|{'|'.join(re.escape(begin) for begin in sorted({form.begin or form.mark for form in FORMATS}))}"
)
"""Ends of thoughts, what opens them, and beginnings of calls."""
_CHANNEL: Final = _found(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?P<name>\w+)<\|message\|>(?P<text>.*?)(?:<\|end\|>|\Z)"
)
"""A message of gpt-oss's channels."""


_ARGUMENTS: Final = "<|message|>"
"""Before the arguments of a call of gpt-oss, which may be empty."""


def families() -> str:
    """The families of models whose calls are read."""
    return "; ".join(form.families for form in (*FORMATS, _BARE))


def calls_in(
    text: str, tools: Sequence[Mapping[str, object]], *, is_whole: bool = True
) -> tuple[str, Sequence[Written]]:
    """Return a text without its calls, and the calls. All stays text if one cannot be read.

    The form that begins first is the one of the text: others may stand in the arguments of its calls. If the text is
    not whole, such an argument may have no end. So all stays text too if a thought has no end, or if what begins
    as a call of any form cannot be read.
    """
    functions: list[Any] = [tool.get("function") for tool in tools]
    types = {str(each.get("name")): _properties(each) for each in functions if isinstance(each, dict)}
    start, is_read = _thoughts_end(text, types)
    if not is_whole and (not is_read or text.rstrip().endswith(_ARGUMENTS)):
        return text, ()
    thoughts, said = text[:start], text[start:]
    _, calls = _read(_BARE, said, types)
    if calls:
        return thoughts.strip(), calls
    begun = sorted(((at, form) for form in FORMATS if (at := _start(form, said)) is not None), key=itemgetter(0))
    first = min((at for at, form in begun if not form.is_plain), default=len(said))
    for at, form in begun:
        rest, calls = _read(form, said, types) if at <= first else (said, ())
        if calls and form.mark not in rest:
            return (thoughts + form.around.sub("", rest)).strip(), calls
    return text, ()


_GIVEN: Final = {"meshrlfirst": "meshrlone", "meshrlsecond": "meshrltwo"}
_PAIRS: Final = r"\s*,\s*".join(rf'"{key}"\s*:\s*"{value}"' for key, value in _GIVEN.items())
_OBJECT: Final = _found(rf"\{{\s*{_PAIRS}\s*\}}")
_TAGGED: Final = _found("(.*?)".join(["", *(word for pair in _GIVEN.items() for word in pair), r"\Z"]))
_TOOL: Final[Mapping[str, object]] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _GIVEN}, "required": []},
    },
}


def form_of(
    render: Callable[[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]], bool], str], ends: Sequence[str]
) -> CallForm | None:
    """The form in which a chat template writes calls, None if it writes none of FORMATS.

    `render`: the template's text of messages and tools, and whether it opens an assistant's turn. `ends`: the texts
    that end a turn.
    """
    user = {"role": "user", "content": "a"}
    for content, own, as_text in product((None, ""), (COUNT, f"functions.{NAME}:{COUNT}"), (False, True)):
        said = list[str]()
        try:
            prompt = render([user], [_TOOL], True)
            for given in (_GIVEN, {}):
                function = {"name": NAME, "arguments": json.dumps(given) if as_text else given}
                call = {"id": own, "type": "function", "function": function}
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                said.append(_answer(prompt, render([user, answer], [_TOOL], False), ends))
            _, calls = calls_in(said[0], [_TOOL])
            if [(name, json.loads(given)) for name, given, _ in calls] == [(NAME, _GIVEN)]:
                form = _between(*said)
                form.named(NAME, 0)
                return form
        except Exception:  # noqa: BLE001, S112 -- a template may raise anything
            continue
    return None


def _answer(prompt: str, text: str, ends: Sequence[str]) -> str:
    """What a template writes of an answer, after what opens it and a thought, up to what ends it."""
    opened = _shared(prompt, text)
    said = text[len(opened if opened == prompt else _whole(opened)) :]
    said = said[: min((said.find(end) for end in ends if end in said), default=len(said))].rstrip()
    thought = max((found.end() for found in _THOUGHT_END.finditer(said)), default=0)
    return said[thought:].lstrip() if thought else said


def _shared(one: str, other: str) -> str:
    """The text with which both begin."""
    return one[: sum(1 for _ in takewhile(bool, map(eq, one, other)))]


def _whole(text: str) -> str:
    """A text without a tag at its end that is cut."""
    return re.sub(r"[<◁\[][^<>◁▷\[\]]*\Z", "", text)


def _between(said: str, empty: str) -> CallForm:
    """The form of a call with arguments that are known, and without any. Raises ValueError if it has none."""
    if found := _OBJECT.search(said):
        return CallForm(said[: found.start()], said[found.end() :])
    if not (pieces := _TAGGED.fullmatch(said)):
        raise ValueError("its arguments are not as they were given")
    head, middle, between, again, tail = pieces.groups()
    closes = _whole(_shared(between, tail))
    opens = between[len(closes) :]
    form = CallForm(head.removesuffix(opens), tail[len(closes) :], opens, middle, closes)
    if middle != again or f"{form.begin}{form.end}" != empty or not head.endswith(opens):
        raise ValueError("its parameters are written in several ways")
    return form


def _properties(function: Mapping[str, Any]) -> Mapping[str, object]:
    parameters = function.get("parameters")
    properties: object = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _thoughts_end(text: str, types: Types) -> tuple[int, bool]:
    """Where thoughts of a text end, which have no calls, and whether each of them has an end and all calls can be read.

    A call that can be read has no end of a thought in it. After one that cannot, every end counts, so that no text is
    read twice.
    """
    start = at = 0
    is_open = False
    while True:
        if at == start and _BARE_BEGIN.match(text, at):
            called = _read(_BARE, text[start:], types)[1]
            return (start, True) if called else (_last_end(text, start), False)
        if (mark := _MARKS.search(text, at)) is None:
            return start, not is_open
        at = mark.end()
        if mark["ends"] is not None:
            start, is_open = at, False
        elif mark["opens"] is not None:
            is_open = True
        elif not is_open:
            end = _call_end(text, mark.start(), types)
            if end is None:
                return _last_end(text, start), False
            at = end


def _last_end(text: str, start: int) -> int:
    return max((found.end() for found in _THOUGHT_END.finditer(text, start)), default=start)


def _call_end(text: str, at: int, types: Types) -> int | None:
    """Where the call ends that begins here. None if none can be read."""
    for form in FORMATS:
        match = form.call.match(text, at) if text.startswith(form.begin or form.mark, at) else None
        if match is None:
            continue
        try:
            calls = [*form.read(match, types)]
        except (ValueError, RecursionError):
            continue
        if calls and not (form.is_plain and any(name not in types for name, _, _ in calls)):
            return match.end()
    return None


def _start(form: Format, text: str) -> int | None:
    """Where the first call of this form begins. None if there is none, or not at the first beginning of one."""
    if form.mark not in text or (at := text.find(form.begin)) < 0:
        return None
    match = form.call.match(text, at) if form.begin else form.call.search(text)
    return match.start() if match else None


def _read(form: Format, text: str, types: Types) -> tuple[str, Sequence[Written]]:
    """Return the text without calls of this form, and the calls: none if one cannot be read."""
    calls, rest, at = list[Written](), list[str](), 0
    try:
        for match in _calls_of(form, text):
            rest.append(text[at : match.start()])
            at = match.end()
            calls += form.read(match, types)
    except (ValueError, RecursionError):  # of msgspec and json too
        return text, ()
    if form.is_plain and any(name not in types for name, _, _ in calls):
        return text, ()
    firsts = {own: at for at, (_, _, own) in reversed([*enumerate(calls)])}
    alone = [(name, given, own if firsts[own] == at else "") for at, (name, given, own) in enumerate(calls)]
    return "".join([*rest, text[at:]]), alone


def _calls_of(form: Format, text: str) -> Iterable[re.Match[str]]:
    """Match all calls. Raises ValueError at the first beginning that begins none, so that no text is read twice."""
    if not form.begin:
        yield from form.call.finditer(text)
        return
    at = 0
    while (at := text.find(form.begin, at)) >= 0:
        match = form.call.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 80]!r} cannot be read")
        yield match
        at = match.end()


def without_channels(text: str) -> str:
    """Return a text of gpt-oss's channels with its thoughts between tags, as other models write them."""
    if not text.lstrip().startswith(("<|channel|>", "<|start|>assistant<|channel|>")):
        return text  # one that talks about channels
    return _CHANNEL.sub(
        lambda match: f"<think>{match['text']}</think>" if match["name"] == "analysis" else match["text"], text
    )
