"""Rows that were sent to an engine, and their results: converts each `Done` to the columns of a batch."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from meshrl.errors import ModelError
from meshrl_inference.messages import Done
from meshrl_torch.model.text import Words, stopped_after
from meshrl_torch.sample.rollouts import Finished, Request


class Call:
    """One call of `generate`, while its rows are decoded."""

    def __init__(self, number: int, first: int, request: Request) -> None:
        self.number = number
        """Below 0 for a call outside training, which is not aborted and is in no record."""
        self.first = first
        """The engine's number of its first row."""
        self.request = request
        self.left = set(range(first, first + len(request.rows)))
        """Rows that have not come back."""
        self.arrived = asyncio.Queue[list[Done] | ModelError]()


def finished(call: Call, words: Words, done: Sequence[Done]) -> Finished:
    """Convert results to the rows of a batch."""
    request = call.request
    done = [_cut(request, words, each.number - call.first, each) for each in done]
    order = np.array([each.number - call.first for each in done])
    prefixes = [np.array(request.prefixes[row], np.int32) for row in request.prefix[order].tolist()]
    drawn = [np.frombuffer(each.tokens, np.int32) for each in done]
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for prefix, tokens, each in zip(prefixes, drawn, done, strict=True):
        versions = np.zeros(len(tokens), np.int32)
        for version, start in each.spans:
            versions[start:] = version
        before = len(prefix)
        pieces.append(
            (
                np.concatenate([prefix, tokens]),
                np.concatenate([np.zeros(before, np.float32), np.frombuffer(each.logprobs, np.float32)]),
                np.concatenate([np.full(before, -1, np.int32), versions]),
            )
        )
    tokens, logprobs, versions = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Finished(
        rows=request.rows[order],
        lengths=np.array([len(piece[0]) for piece in pieces]),
        prompts=request.starts[order],
        truncated=np.array([each.reason == "length" for each in done]),
        aborted=np.array([each.reason == "abort" for each in done]),
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
    )


def _cut(request: Request, words: Words, row: int, done: Done) -> Done:
    """End a row that continued earlier tokens at a stop text that begins in these.

    The engine looks for stop texts only in what it samples.
    """
    prefix = request.prefixes[int(request.prefix[row])]
    begun = prefix[int(request.starts[row]) :]
    if not begun or not request.stop:
        return done
    tokens = np.frombuffer(done.tokens, np.int32)
    end = stopped_after(words.tokenizer, [*begun, *tokens.tolist()], len(begun), request.stop)
    if end is None:
        return done
    new = end - len(begun)
    return msgspec.structs.replace(
        done,
        tokens=tokens[:new].tobytes(),
        logprobs=np.frombuffer(done.logprobs, np.float32)[:new].tobytes(),
        reason="stop",
    )
