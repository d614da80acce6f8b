"""Constraints as masks of logits: grammars of llguidance, which the sampler and the trainers follow token by token.

A grammar's state after the same tokens of the same tokenizer allows the same tokens next, on any machine. So no mask
travels: a trainer follows each row again.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshrl.data import UNREPEATED, Batch, Branch, Constraint, masked_spans, read_constraint
from meshrl.errors import BackendError, DataError
from meshrl_torch.model.text import Words, added_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits: TypeAlias = NDArray[np.int32]
"""A mask of tokens, 32 in each number: int32[rows, numbers]. All bits of a row without a constraint are set."""
ALL: Final = -1
_KEPT: Final = 256
"""Grammars that are kept compiled, and texts that are kept encoded, for each tokenizer."""
_SPACES: Final = r"[ \n]{1,20}"
"""Spaces between the parts of JSON. Without a limit, a model may write spaces forever."""


def check_installed() -> None:
    """Raise BackendError if llguidance is missing."""
    if find_spec("llguidance") is None:
        raise BackendError("constraints need the package 'llguidance': pip install 'meshrl[constraints]'")


def check_grammar(constraint: Constraint) -> None:
    """Raise DataError if a constraint has a schema or an expression that cannot be followed."""
    check_installed()
    if fault := _fault(constraint.text):
        raise DataError(f"an answer cannot be held to {constraint.text[:200]}: {fault}")


@lru_cache(_KEPT)
def _fault(text: str) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 -- an extra

    return LLMatcher.validate_grammar(grammar_of(read_constraint(text, "a row"), {}))


def grammar_of(constraint: Constraint, special: Mapping[str, int]) -> str:
    """The grammar of a constraint, as llguidance reads it. `special`: tokens that a text cannot spell, by name."""
    from llguidance import LLMatcher  # noqa: PLC0415 -- an extra

    return LLMatcher.grammar_from_lark(lark_of(constraint, special))


def lark_of(constraint: Constraint, special: Mapping[str, int]) -> str:
    """The grammar of a constraint in llguidance's form of Lark."""
    rules = list[str]()
    forms = [f"branch{number}" for number in range(len(constraint.branches))]
    start = f"({' | '.join(forms)})"
    if constraint.thought:
        start = f"thought spaces {start}"
        rules.append(r"spaces: /[ \n]{0,4}/")
        if constraint.thought in special:
            rules.append(f"thought: /(?s:.*)/ <[{special[constraint.thought]}]>")
        else:
            rules.append(f"thought[suffix={json.dumps(constraint.thought)}]: /(?s:.*)/")
    for form, branch in zip(forms, constraint.branches, strict=True):
        rules += _rules(form, branch, special)
    return "\n".join([f"start: {start}", *rules])


def _rules(form: str, branch: Branch, special: Mapping[str, int]) -> Iterator[str]:
    """The rule of a branch, and those that it needs."""
    ends = _literals(branch.end, special)
    if branch.without is not None:  # a text ends where what is after it begins, so both are one terminal
        after = ends.pop(0) if ends and ends[0].startswith('"') else ""
        yield f"{form.upper()}_TEXT: /(?s:.*)/ & ~/(?s:.*)({branch.without.replace('/', chr(92) + '/')})(?s:.*)/"
        yield f"{form.upper()}: {form.upper()}_TEXT {after}"
        content = form.upper()
    elif branch.parts is not None:
        names = [f"{form}_{number}" for number in range(len(branch.parts))]
        for name, part in zip(names, branch.parts, strict=True):
            yield from _rules(name, part, special)
        marked = zip(names, branch.parts, strict=True)
        content = " ".join(f"{name}?" if part.is_optional else name for name, part in marked) or '""'
    else:
        content = _content(branch)
    yield f"{form}: {' '.join([*_literals(branch.begin, special), f'{form}_content', *ends])}"
    yield f"{form}_content: {content}"


def _literals(text: str, special: Mapping[str, int]) -> list[str]:
    """The pieces of a text, with special tokens as such."""
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    pieces = re.split(f"({names})", text) if names else [text]
    return [f"<[{special[each]}]>" if each in special else json.dumps(each) for each in pieces if each]


def _content(branch: Branch) -> str:
    from llguidance import regex_to_lark  # noqa: PLC0415 -- an extra

    if branch.choices:
        return " | ".join(map(json.dumps, branch.choices))
    if branch.regex is not None:
        return f"/{regex_to_lark(branch.regex, use_ascii='')}/"
    schema = branch.schema if isinstance(branch.schema, Mapping) else {} if branch.schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACES}})}"


class _CharacterVocabulary:
    """The vocabulary of a tokenizer whose tokens are the characters that they stand for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: int) -> None:
        texts: list[str] = [text or "" for text in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        self.tokens = [text.encode() for text in texts] + [b""] * (tokens - len(texts))
        self.special_token_ids = sorted(added_tokens(tokenizer).values())
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = None
        self._ids = {text: number for number, text in enumerate(self.tokens) if number not in self.special_token_ids}
        self._longest = max(map(len, self._ids), default=1)
        self._encoded = lru_cache(_KEPT)(self._encode)

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text in UTF-8 up to a character that has no token. Grammars ask for the same texts at each token."""
        return self._encoded(text)

    def _encode(self, text: bytes) -> list[int]:
        ids, at = list[int](), 0
        while at < len(text):
            fits = (text[at : at + size] for size in range(self._longest, 0, -1))
            found = next((each for each in fits if each in self._ids), None)
            if found is None:
                break
            ids.append(self._ids[found])
            at += len(found)
        return ids


def unmasked(tokens: int, rows: int) -> Bits:
    """Masks that allow all tokens, int32[rows, numbers]."""
    return np.full((rows, (tokens + 31) // 32), ALL, np.int32)


class Grammars:
    """The grammars of one model's tokenizer."""

    def __init__(self, words: Words) -> None:
        check_installed()
        self._known = words.known
        self._ends = words.ends
        self._tokenizer = _vocabulary(words)
        added = added_tokens(words.tokenizer).items()
        self.special = {text: token for text, token in added if self._tokenizer.is_special_token(token)}
        """Tokens that no text can spell in a grammar, by name: for llguidance all names in angle brackets."""
        self._compiled = lru_cache(_KEPT)(self._compile)

    def begin(self, text: str, tokens: Sequence[int], where: str) -> "LLMatcher":
        """Return the state of a constraint after these tokens. DataError if it does not allow them."""
        matcher = self._compiled(text).deep_copy()
        content = list(tokens[:-1] if len(tokens) and tokens[-1] in self._ends else tokens)
        allowed = matcher.try_consume_tokens(content) if content else 0
        if allowed < len(content):  # perhaps too many for one call, or other answers have used the grammar up
            matcher, allowed = self.anew(text, content)
        if allowed < len(content) or (allowed < len(tokens) and not matcher.is_accepting()):
            raise DataError(
                f"{where} has the token {tokens[allowed]} at place {allowed} of an answer, which its constraint does "
                f"not allow: {text[:200]}. A row keeps its constraint for as long as it is drawn, and a trainer has "
                "the sampler's tokenizer and version of llguidance"
            )
        return matcher

    def anew(self, text: str, content: Sequence[int]) -> "tuple[LLMatcher, int]":
        """Follow tokens one by one by a new grammar. Returns the state after them, and how many it allowed.

        All answers of a compiled grammar share its lexer, which fails for all of them if they need too many states. So
        only a new one comes as far in a trainer as in a sampler.
        """
        self._compiled.cache_clear()
        matcher, allowed = self._compiled(text).deep_copy(), 0
        while allowed < len(content) and self.fill([matcher]).any() and matcher.consume_token(content[allowed]):
            allowed += 1
        return matcher, allowed

    def over(self, text: str, tokens: Sequence[int], where: str) -> Bits:
        """Return the tokens that were allowed at the place of each of these, int32[tokens, numbers]."""
        matcher, allowed = self.begin(text, (), where), list[NDArray[np.int32]]()
        for at, token in enumerate(tokens):
            if not self.fill([matcher]).any():
                matcher, _ = self.anew(text, tokens[:at])
            allowed.append(self.follow(matcher, text, where))
            matcher.consume_token(token)
        return np.array(allowed, np.int32).reshape(len(tokens), -1)

    def follow(self, matcher: "LLMatcher", text: str, where: str) -> NDArray[np.int32]:
        """Return the tokens that a state allows next, int32[numbers]. DataError if no token can follow."""
        bits: NDArray[np.int32] = self.fill([matcher])[0]
        if not bits.any():
            raise DataError(
                f"{where}: no token of the model can continue an answer under its constraint, for example because its "
                f"tokenizer lacks a character: {text[:200]} {matcher.get_error()[:400]}".rstrip()
            )
        return bits

    def fill(self, matchers: "Sequence[LLMatcher | None]") -> Bits:
        """Return the tokens that each state allows next. A row has none if no token can follow."""
        bits = unmasked(self._known, len(matchers))
        start, size = bits.ctypes.data, bits.strides[0]
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)
                if matcher.is_error():
                    bits[row] = 0
        return bits

    def step(self, matchers: "Sequence[LLMatcher | None]", tokens: Sequence[int], bits: Bits) -> list[int]:
        """Let states take a token each, and set the tokens that they allow next. Returns the rows that refuse theirs.

        Both at once for each state, while the processor has it in its caches.
        """
        refused, start, size = list[int](), bits.ctypes.data, bits.strides[0]
        addresses = range(start, start + bits.nbytes, size)
        for row, (matcher, token, address) in enumerate(zip(matchers, tokens, addresses, strict=True)):
            if matcher is None:
                continue
            if matcher.consume_token(token):
                matcher.unsafe_compute_mask_ptr(address, size)
                if matcher.is_error():
                    bits[row] = 0
            else:
                refused.append(row)
        return refused

    def _compile(self, text: str) -> "LLMatcher":
        from llguidance import LLMatcher  # noqa: PLC0415 -- an extra

        grammar = grammar_of(read_constraint(text, "a row"), self.special)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise DataError(f"an answer cannot be held to {text[:200]}: {matcher.get_error()[:400]}")
        self.follow(matcher.deep_copy(), text, "a row")
        return matcher


def plain_lark(words: Words, constraint: Constraint) -> str:
    """The grammar of a constraint for engines that take no special tokens in one, and read the tokenizer themselves.

    DataError if the constraint has special tokens, or if llguidance cannot read the tokenizer without being told its
    tokens, and BackendError if it cannot at all: such an engine dies of the first constraint.
    """
    rule = lark_of(constraint, {})
    if rule != lark_of(constraint, grammars_of(words).special):
        raise DataError(
            f"{constraint.text[:200]}: it has a special token of this model, which the sampler's engine takes in no "
            'grammar: use sampler.backend = "torch"'
        )
    if _is_spelled(words.tokenizer):
        raise DataError(
            f"{constraint.text[:200]}: the sampler's engine cannot follow it with this model, whose tokens are the "
            'characters that they stand for, as those of NewModel.characters: use sampler.backend = "torch"'
        )
    return rule


def _is_spelled(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokens of a tokenizer are the characters that they stand for, which llguidance has to be told."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    return isinstance(tokenizer.backend_tokenizer.decoder, decoders.Fuse | None)


def _vocabulary(words: Words) -> "LLTokenizer":
    """The tokens of a model, with its ends. BackendError for a tokenizer that llguidance cannot read."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 -- an extra
    from llguidance.hf import from_tokenizer  # noqa: PLC0415 -- an extra

    tokenizer, ends = words.tokenizer, sorted(words.ends)
    if _is_spelled(tokenizer):
        spelled = _CharacterVocabulary(tokenizer, words.known)
        return LLTokenizer(TokenizerWrapper(spelled), n_vocab=words.known, eos_token=ends)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        try:
            return from_tokenizer(tokenizer, n_vocab=words.known, eos_token=ends)
        except ValueError as error:
            fault = str(error)
    else:
        fault = f"{type(tokenizer).__name__} is not a fast tokenizer"
    raise BackendError(f"the tokenizer of {tokenizer.name_or_path or 'this model'} cannot follow constraints: {fault}")


_GRAMMARS: Final[WeakKeyDictionary[PreTrainedTokenizerBase, Grammars]] = WeakKeyDictionary()


def grammars_of(words: Words) -> Grammars:
    """The grammars of a model's tokenizer, made once. BackendError if they cannot be."""
    if words.tokenizer not in _GRAMMARS:
        _GRAMMARS[words.tokenizer] = Grammars(words)
    return _GRAMMARS[words.tokenizer]


@cache
def _denied_of_a_byte(device: torch.device) -> Tensor:
    """The eight tokens that each byte of a mask denies, bool[8] packed as int64[256]."""
    denied = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(denied.view(np.int64)[:, 0]).to(device)


def restricted(logits: Tensor, bits: Bits | Tensor) -> Tensor:
    """Return logits [tokens, vocabulary] with minus infinity at tokens that `bits` do not have."""
    if logits.device.type == "cpu":  # where numpy unpacks bits faster
        allowed = np.unpackbits(np.asarray(bits).view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        return torch.where(torch.from_numpy(allowed.view(np.bool_)), logits, -torch.inf)
    packed = torch.as_tensor(bits, device=logits.device).view(torch.uint8)
    eights = _denied_of_a_byte(logits.device).index_select(0, packed.int().flatten())
    denied = eights.view(torch.bool).view(len(packed), 8 * packed.shape[1])[:, : logits.shape[1]]
    return torch.where(denied, -torch.inf, logits)


def check_masked(words: Words, batch: Batch) -> None:
    """Raise DataError if the masks under which a batch was drawn cannot be repeated here."""
    for span in _spans(batch):
        grammars_of(words).begin(span.constraint, span.tokens, span.where)


def masks(words: Words, batch: Batch, target: NDArray[np.int64]) -> Tensor | None:
    """The tokens that were allowed at each of these places, int32[target, numbers]. None if none has a mask.

    `target`, int64[target]: places in the batch's token column.
    """
    order = np.argsort(target)
    places = target[order]
    bits: Bits | None = None
    for span in _spans(batch):
        low, high = np.searchsorted(places, (span.begin, span.begin + len(span.tokens))).tolist()
        some = slice(low, high)
        if low == high:
            continue
        grammars = grammars_of(words)
        bits = grammars.fill([None] * len(target)) if bits is None else bits
        bits[order[some]] = grammars.over(span.constraint, span.tokens, span.where)[places[some] - span.begin]
    return None if bits is None else torch.from_numpy(bits)


class _Span(NamedTuple):
    """Tokens that were drawn under a constraint."""

    begin: int
    """The place of the first in the batch's token column."""
    tokens: Sequence[int]
    constraint: str
    where: str


def _spans(batch: Batch) -> Iterator[_Span]:
    """Yield what was drawn under masks. DataError if a mask cannot be repeated, or a row is shorter."""
    for row, spans in enumerate(masked_spans(batch)):
        where, tokens = batch.place(row), batch.tokens[row]
        for begin, end, text in spans:
            if text == UNREPEATED:
                raise DataError(
                    f"{where} was drawn by an engine under a mask of its own, which a trainer cannot repeat: learn "
                    'from constrained answers with sampler.backend = "torch"'
                )
            if not 0 <= begin <= end <= len(tokens):
                raise DataError(f"`masked` of {where} is of tokens {begin} to {end}, and the row has {len(tokens)}")
            yield _Span(int(batch.tokens.offsets[row]) + begin, np.asarray(tokens[begin:end]).tolist(), text, where)
