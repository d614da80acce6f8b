"""How attention scores keys. Scores with a cap or sinks, which no kernel takes, are made for some queries at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MOST: Final = 1 << 24
"""Scores that are made at once, 64 MiB in float32, unless one query of each row has more."""


@dataclass(frozen=True)
class Scores:
    """How a layer scores the keys that a query sees, which are up to its own position."""

    scale: float
    window: int | None = None
    """Positions up to its own that a query sees. None: all."""
    chunk: int | None = None
    """A query sees only its own chunk of this many positions. None: no chunks."""
    cap: float | None = None
    """The limit of scores, which tanh approaches. None: no limit."""
    sinks: Tensor | None = None
    """[heads]: the score of one more key, whose value is 0. None: no such key."""

    @property
    def own(self) -> bool:
        """True if neither SDPA nor kernels for packed sequences compute it."""
        return self.cap is not None or self.sinks is not None

    @property
    def plain(self) -> bool:
        """True if kernels for packed sequences compute it."""
        return self.chunk is None and not self.own

    def hide(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of queries and keys at these positions: 0, or -inf if hidden."""
        hidden = key > query
        if self.window is not None:
            hidden |= key <= query - self.window
        if self.chunk is not None:
            hidden |= key // self.chunk != query // self.chunk
        return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, -torch.inf)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return [rows, heads, queries, dims]. Key heads divide query heads.

        `mask` is added to the scores. Without it, the queries are all keys' or those of the last keys, and each sees
        keys up to its own. SDPA then takes one query, or as many as there are keys, without a window or chunk.
        """
        if self.own:
            attend = cast("Any", _InBlocks.apply)
            return cast("Tensor", attend(query, key, value, self.sinks, self, mask))
        causal = mask is None and query.shape[2] > 1
        shared = query.shape[1] != key.shape[1]
        if shared and query.device.type == "cuda":  # else torch would keep all scores of all heads
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
            shared = False
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=self.scale, enable_gqa=shared
        )

    def blocks(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Iterator["Block"]:
        """Divide queries so that each block has at most MOST scores, with the keys that one of its queries sees."""
        (rows, heads, queries), keys = query.shape[:3], key.shape[2]
        reach = keys if mask is not None else min(self.window or keys, self.chunk or keys)
        count = max(1, min(MOST // (rows * heads * min(keys, 2 * reach)), reach))
        for start in range(0, queries, count):
            end = min(start + count, queries)
            if mask is not None:
                yield Block(slice(start, end), slice(0, keys), mask[..., start:end, :])
                continue
            place = torch.arange(keys - queries + start, keys - queries + end, device=key.device)[:, None]
            first = max(0, keys - queries + start + 1 - (self.window or keys))
            if self.chunk is not None:
                first = max(first, (keys - queries + start) // self.chunk * self.chunk)
            seen = slice(first, keys - queries + end)
            hidden = self.hide(place, torch.arange(seen.start, seen.stop, device=key.device), query.dtype)
            yield Block(slice(start, end), seen, hidden)

    def weights(self, block: "Block", query: Tensor, key: Tensor, sinks: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return tanh of a block's scores if they have a cap, and the softmax, float32[rows, heads, queries, keys].

        With sinks, it has one more key.
        """
        own = query[:, :, block.queries]
        scores = (_by_group(own, key) @ key[:, :, block.keys].mT).view(*own.shape[:3], -1) * self.scale
        turned = None
        if self.cap is not None:
            turned = (scores / self.cap).tanh()
            scores = turned * self.cap
        scores = scores + block.hidden
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
        return turned, scores.softmax(-1, dtype=torch.float32)


class Block(NamedTuple):
    """Some queries."""

    queries: slice
    keys: slice
    """What some of them see."""
    hidden: Tensor
    """Added to their scores."""


def _by_group(states: Tensor, key: Tensor) -> Tensor:
    """Put the query heads of each key head after each other, [rows, key heads, heads of each * queries, dims]."""
    return states.reshape(len(states), key.shape[1], -1, states.shape[-1])


class _InBlocks(torch.autograd.Function):
    """Attention that keeps no scores: the backward pass computes those of each block again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scores: Scores, mask: Tensor | None
    ) -> Tensor:
        output = value.new_empty(*query.shape[:3], value.shape[-1])
        for block in scores.blocks(query, key, mask):
            _, weights = scores.weights(block, query, key, sinks)
            seen = value[:, :, block.keys]
            mixed = _by_group(weights[..., : seen.shape[2]].to(value.dtype), key) @ seen
            output[:, :, block.queries] = mixed.view_as(output[:, :, block.queries])
        ctx.save_for_backward(query, key, value, sinks, mask, output)
        ctx.scores = scores
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, output = ctx.saved_tensors
        of_query, of_sinks = torch.empty_like(query), None if sinks is None else torch.zeros_like(sinks).float()
        of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (key, value))
        for block in ctx.scores.blocks(query, key, mask):
            turned, weights = ctx.scores.weights(block, query, key, sinks)
            seen, given = value[:, :, block.keys], gradients[0][:, :, block.queries]
            weighed = (given.float() * output[:, :, block.queries].float()).sum(-1, keepdim=True)
            own = weights[..., : seen.shape[2]]
            if of_sinks is not None:
                of_sinks -= (weights[..., seen.shape[2] :] * weighed).sum((0, 2))[:, 0]
            of_value[:, :, block.keys] += _by_group(own.to(value.dtype), key).mT @ _by_group(given, key)
            slope = own * ((_by_group(given, key) @ seen.mT).view_as(own) - weighed)
            if turned is not None:
                slope *= 1 - turned.float().square()
            slope = _by_group((slope * ctx.scores.scale).to(query.dtype), key)
            of_query[:, :, block.queries] = (slope @ key[:, :, block.keys]).view_as(query[:, :, block.queries])
            of_key[:, :, block.keys] += slope.mT @ _by_group(query[:, :, block.queries], key)
        of_sinks = None if sinks is None or of_sinks is None else of_sinks.to(sinks.dtype)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None
