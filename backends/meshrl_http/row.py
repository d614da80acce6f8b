"""A row that servers decode, perhaps in pieces. It continues after its tokens, wherever they were sampled."""

from dataclasses import dataclass, field

import numpy as np

from meshrl.data import read_constraint
from meshrl_http.dialects import DrawRequest, Piece
from meshrl_inference.engine_side.protocol import FinishedRow, Generate, Row
from meshrl_torch.model.decoding import stopped_after
from meshrl_torch.model.text import Words

_SEEDS = (1 << 63) - 1
_STRIDE = 0x9E3779B97F4A7C15


@dataclass
class Decoded:
    """A row with its sampled tokens."""

    row: Row
    order: Generate
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Numbers of loads, each with the index of the first new token that was sampled after it."""
    tries: int = 0
    wanted: bool = False
    """True if it is to be returned as it is."""
    stopped: bool = False
    """True if a stop text is complete."""

    def request(self, session: str, salt: str) -> DrawRequest:
        """Return the next request for it."""
        self.tries += 1
        order, rule = self.order, self.row.rule
        if rule:  # a server would follow it from its beginning
            self.tokens.clear()
            self.logprobs.clear()
            self.spans.clear()
        return DrawRequest(
            name=f"{session}-{self.row.number}-{self.tries}.",  # no name may begin with another, or both abort
            tokens=[*np.frombuffer(self.row.tokens, np.int32).tolist(), *self.tokens],
            limit=self.row.max_tokens - len(self.tokens),
            temperature=order.temperature,
            top_p=order.top_p,
            top_k=order.top_k,
            seed=(self.row.seed + _STRIDE * len(self.tokens)) & _SEEDS,
            ends=order.ends,
            stop=order.stop,
            salt=salt,
            branch=read_constraint(rule, f"row {self.row.number}").branches[0] if rule else None,
        )

    def take(self, piece: Piece, load: int, words: Words) -> None:
        """Add tokens sampled after a load, up to a complete stop text: servers may miss it."""
        had = len(self.tokens)
        if piece.tokens and (not self.spans or self.spans[-1][0] != load):
            self.spans.append((load, had))
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if self.order.stop:
            prompt = np.frombuffer(self.row.tokens, np.int32).tolist()
            end = stopped_after(words, [*prompt, *self.tokens], len(prompt), len(prompt) + had, self.order.stop)
            if end is not None:
                self.stopped = True
                del self.tokens[end - len(prompt) :], self.logprobs[end - len(prompt) :]

    @property
    def reason(self) -> str | None:
        """Return why it has ended, or None if it continues, regardless of the server's reason."""
        if self.stopped or (self.tokens and self.tokens[-1] in self.order.ends):
            return "stop"
        if len(self.tokens) >= self.row.max_tokens:
            return "length"
        return "abort" if self.wanted else None

    def done(self) -> FinishedRow:
        """Return the row as a message for the sampler."""
        return FinishedRow.of(self.row.number, self.tokens, self.logprobs, self.spans, self.reason or "abort")
