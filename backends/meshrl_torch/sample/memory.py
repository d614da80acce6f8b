"""Choose what a sampler's model remembers of its rows, by what it computes with it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from meshrl import log
from meshrl.errors import ModelError, described
from meshrl_torch.model.network import LanguageModel, stand_in_of, with_layout
from meshrl_torch.model.proof import is_close
from meshrl_torch.sample.cache import Cache, Ints, Slots
from meshrl_torch.sample.own_cache import CACHES, OwnCache

NewSlots: TypeAlias = Callable[[], Slots]


def remembered(model: LanguageModel) -> tuple[LanguageModel, NewSlots]:
    """Return a model with the first kind of slots by which it draws from the states of whole rows.

    Packed slots, if its rows are packed, then the model's own cache, and at last none. The log says so. A stand-in of
    its architecture is asked first, because rounding hides small mistakes in a model's own dtype.
    """
    probe, why = stand_in_of(model), ""
    for made, slots, name in _kinds(model):
        probe.network.set_attn_implementation(made.layout.attention)
        fault = _fault(replace(probe, layout=made.layout), slots()) or _fault(made, slots())
        if not fault:
            if name != "packed":
                log.info("what is remembered of rows", model=type(model.network).__name__, cache=name, why=why)
            return made, slots
        why = fault
    raise ModelError(f"{type(model.network).__name__} computes other states for the same tokens in another pass: {why}")


def _kinds(model: LanguageModel) -> Iterator[tuple[LanguageModel, NewSlots, str]]:
    if model.layout.name == "packed":
        yield model, Cache, "packed"
        model = with_layout(model, "padded")
    for keyword in CACHES:
        yield model, partial(OwnCache, keyword), keyword or "none, whole rows are read for each token"


@torch.inference_mode()
def _fault(model: LanguageModel, slots: Slots) -> str:
    """Say why rows in slots that are moved and shared have not the states of whole rows. Empty if they have."""
    rows = [np.array(row, np.int64) % model.known for row in ([2, 3, 4, 5, 6], [6, 5, 7, 2, 3, 4])]

    def whole(row: Ints) -> torch.Tensor:
        slots.begin(1)
        slots.reserve(len(row))
        return slots.fill(model, [row], np.zeros(1, np.int64), np.zeros(1, np.int64), False).hidden[0]

    try:
        wanted = [whole(row) for row in rows]
        slots.begin(5)
        slots.reserve(6)
        # Slots 0 and 1 continue the first row, and slot 3 the second, which then moves to slot 2 where a row has ended.
        slots.fill(model, [rows[0][:3], rows[1][:4]], np.array([0, 0, 0, 1, 0]), np.arange(5), False)
        slots.move(torch.tensor([3]), torch.tensor([2]), 6)
        places = np.array([3, 3, 4])
        ids = np.array([[rows[0][3], rows[0][3], rows[1][4]], [rows[0][4], rows[0][4], rows[1][5]]])
        slots.grow(model, ids[0], places, False)
        found = slots.grow(model, ids[1], places + 1, False).hidden
        return "" if is_close(model, found, torch.stack([wanted[0], *wanted])) else "rows have other states"
    except Exception as error:  # noqa: BLE001 - whatever the model's code does with a cache that it does not have
        return described(error)
