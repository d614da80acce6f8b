"""Prove how a model may read rows, by what it computes for a few tokens."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshrl import log
from meshrl.data import Ragged
from meshrl.errors import ModelError
from meshrl.roles import Packing
from meshrl_torch.model.attention import Packed, moved
from meshrl_torch.model.layout import PACKED, PaddedRows
from meshrl_torch.model.making import MAKING, WithoutValues
from meshrl_torch.model.mixers import Kinds, Mixers, kinds_in
from meshrl_torch.model.packing import MicroBatch, whole
from meshrl_torch.model.routing import Routes, TopKFinder

if TYPE_CHECKING:
    from meshrl_torch.model.network import LanguageModel

_FARTHEST: Final = 1 << 20
"""Most positions of a model that has no limit, when its packing is checked."""
_ROUNDING: Final = 1e-5
"""Most that the order of sums changes states in float32, relative to the largest."""
_PLAIN: Final[Mapping[str, object]] = {"dtype": torch.float32, "experts_implementation": "eager"}
"""How a stand-in computes: no kernel needs matrices as they are in memory."""
_KNOWN: Final = 64
"""Tokens in the head of a stand-in."""
_WINDOWS: Final = {"sliding_window": 3, "attention_chunk_size": 3}
"""Keys of a configuration that bound what a token sees, and their value in a stand-in."""
_LIMITS: Final = {"attn_logit_softcapping": 0.5, "floor_scale": 3}
"""Keys of a configuration whose effect only large scores or positions show, and their value in a stand-in."""
_OWN, _LAST, _LONG = (5, 6, 2, 3), (4, 5), (2, 3, 4, 5, 6, 2, 3)
"""Three rows."""
_PROMPT = (8, 9)
_ROWS: Final = ((2, 3, 4), (*_PROMPT, *_OWN), (*_PROMPT, 4, 7), (3, 5))
"""The rows of a packed pass. Two share a prompt, and all have other lengths."""
_OTHERS: Final = ((6, 5, 7), (*_PROMPT, *_OWN[:-1], 4), (*_PROMPT, 4, 5), (5, 4))
"""The same prompt and lengths, and the tokens of the second row but its last. All else differs."""
_EVEN: Final = ((2, 3, 4, 7), (5, 6, 2, 3), (9, 4, 5, 8))
"""Rows of one length, in the order of a packed pass."""

_found: Final[dict[tuple[str, str, int], tuple[ModelError | None, Kinds]]] = {}
"""What `_packs` says of an architecture, by its configuration and longest row."""


def proved(
    model: "LanguageModel", packing: Packing, with_network: Callable[[PreTrainedModel], "LanguageModel"]
) -> "LanguageModel":
    """Return a model that reads rows as is proved: packed if that is asked for, or else padded. The log says which.

    Proved is a stand-in of its architecture, in float32 and with short windows, and then the model itself if it has
    values.
    `with_network` returns the model of another network. ModelError if neither way is proved, or "packed" is not.
    """
    name = type(model.network).__name__
    key = name, model.network.config.to_json_string(), model.max_tokens
    if key not in _found:
        probe = with_network(stand_in(model.network, model.max_tokens))
        _check_head(probe)
        _found[key] = _packs(probe)
    fault, kinds = _found[key]
    if kinds and model.mixers is None:
        model = replace(model, mixers=Mixers(model.network, kinds))
    if fault is None and model.device.type != "meta":
        fault = why_not_packed(model)
    if fault is not None or packing == "padded":
        return read_padded(model, fault, packing, with_network)
    by_rows = {"by_rows": sorted(each.__name__ for each in kinds)} if kinds else {}
    log.info("rows of a pass", model=name, layout="packed", **by_rows)
    return replace(model, layout=PACKED)


def read_padded(
    model: "LanguageModel",
    fault: ModelError | None,
    packing: Packing,
    with_network: Callable[[PreTrainedModel], "LanguageModel"],
) -> "LanguageModel":
    """Return a model that reads padded rows, as is proved of a stand-in. The log says so.

    `fault`: why it does not pack them, if it cannot. ModelError if "packed" is asked for.
    """
    if packing == "packed":
        raise ModelError(f'{fault}, so its rows cannot be packed: set packing = "auto" to train it with padded rows')
    layout = _padded(with_network(stand_in(model.network, model.max_tokens)))
    layout = replace(layout, why=str(fault or 'packing = "padded"'))
    log.info("rows of a pass", model=type(model.network).__name__, layout="padded", why=layout.why)
    return replace(model, layout=layout)


def _packs(probe: "LanguageModel") -> tuple[ModelError | None, Kinds]:
    """Say why a stand-in does not pack rows, if it does not, and what has to read segments as rows if it does."""
    fault = why_not_packed(probe)
    if fault is None:
        return None, {}
    probe.network.set_attn_implementation(PACKED.attention)
    try:
        with torch.no_grad():
            kinds = kinds_in(probe.network, _packed(probe, _ROWS).attend, partial(_packed_states, probe, _ROWS))
    except Exception:  # noqa: BLE001 - as `why_not_packed`
        return fault, {}
    fault = why_not_packed(replace(probe, mixers=Mixers(probe.network, kinds))) if kinds else fault
    return fault, kinds if fault is None else {}


@torch.no_grad()
def _check_head(model: "LanguageModel") -> None:
    """Raise ModelError for a model that cannot be called, or whose head reads more than the last hidden states."""
    name, network = type(model.network).__name__, model.network
    if network.get_output_embeddings() is None:  # a classifier
        return
    try:
        network.set_attn_implementation("eager")
        states = _states(replace(model, layout=PaddedRows("eager")), [_OWN])[0]
        wanted, found = network(input_ids=_ids(model, [_OWN]), use_cache=False).logits[0].float(), model.logits(states)
    except Exception as error:
        raise _unreadable(name) from error
    if found.shape != wanted.shape or not _close(found, wanted):
        raise ModelError(f"{name} makes its logits of more than its last hidden states: meshrl cannot train it")


def why_not_packed(model: "LanguageModel") -> ModelError | None:
    """Say how the rows of a packed sequence see each other, or why the model computes something else for them.

    Nothing that a row does not see may change a bit of its states, in the dtype of the weights. In float32 they must
    also be what the model's own code computes, to rounding.
    """
    name, network = type(model.network).__name__, model.network
    packed, wrong = replace(model, layout=PACKED), None
    network.set_attn_implementation(PACKED.attention)
    try:  # compiled blocks would be compiled for these passes alone, and they hold no attention
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            followed, rows, seen = _seen_behind_others(packed)
            if not torch.equal(rows[1][:-1], seen) and not (_regroups(packed, followed) and _are_a_batch(packed)):
                wrong = "see each other"
            elif _dtype(model) == torch.float32:
                network.set_attn_implementation("eager")
                eager = replace(model, layout=PaddedRows("eager"))
                alone = [_states(eager, [row])[0] for row in _ROWS[:3]]
                same = _close(torch.cat(rows[:3]), torch.cat(alone)) and _close(seen, alone[1][:-1])
                wrong = None if same else "are not what transformers computes"
    except ModelError as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever the model's code does with what it was not written for
        return ModelError(f"{name} does not take the keywords of packed sequences: {type(error).__name__}: {error}")
    finally:
        network.set_attn_implementation(PACKED.attention)
    if wrong is None:
        return None
    return ModelError(
        f"the packed rows of {name} {wrong} (a recurrent state or a convolution, its own kind of attention, positions "
        "that do not restart or that depend on the longest row)"
    )


def _seen_behind_others(model: "LanguageModel") -> tuple["LanguageModel", list[Tensor], Tensor]:
    """Return the states of packed rows, and of one of them but its last token, where all that it does not see differs.

    The model comes first, without routers if they cannot be told their experts. The last row then has the model's last
    positions, because positions may depend on the highest of a pass. Experts are the same, because other numbers of
    tokens for each are multiplied in another order.
    """
    routes = None if model.routers is None else Routes()
    try:
        rows = _packed_states(model, _ROWS, routes)
        given = None if routes is None else Routes(torch.stack(routes.seen, 1).long())
        others = _packed_states(model, _OTHERS, given, far=True)
    except (ModelError, RuntimeError):
        if routes is None:
            raise
        model.begin(None, None)  # its routers cannot be followed
        return _seen_behind_others(replace(model, routers=None))
    return model, rows, others[1][:-1]


def _regroups(model: "LanguageModel", followed: "LanguageModel") -> bool:
    """True if a model has other routers than those of `followed`, which follow given experts."""
    if model.routers is not followed.routers:
        return True
    with TopKFinder(model.network, sum(map(len, _ROWS)) - len(_PROMPT)) as choosing:
        _packed_states(model, _ROWS)
    return choosing.unknown(model.routers) is not None


def _are_a_batch(model: "LanguageModel") -> bool:
    """True if packed rows of one length have the bits of the model's own code for a batch of them.

    So they do not see each other, even if their bits depend on how many tokens each expert has.
    """
    found = torch.stack(_packed_states(model, _EVEN))
    for kind in ("sdpa", "eager"):
        try:
            model.network.set_attn_implementation(kind)
        except (ValueError, ImportError):  # a model without it
            continue
        if torch.equal(_states(replace(model, layout=PaddedRows(kind)), _EVEN), found):
            return True
    return False


def _packed_states(
    model: "LanguageModel", rows: Sequence[Sequence[int]], routes: Routes | None = None, *, far: bool = False
) -> list[Tensor]:
    """Return the states of each of some packed rows. `far`: the last one has the model's last positions."""
    micro = _packed(model, rows)
    positions, last = micro.positions, min(model.max_tokens, _FARTHEST)
    if far and last > len(rows[-1]):
        is_last = moved(torch.from_numpy(micro.read > micro.read.max() - len(rows[-1])), model.device)
        positions = positions + (last - len(rows[-1])) * is_last
    beyond = positions >= model.native_tokens if far else None
    states = model.hidden(micro.ids % model.known, positions, micro.attend, routes, beyond)[0]
    return list(states[micro.source[np.argsort(micro.target)]].split([len(row) for row in rows]))


def _packed(model: "LanguageModel", rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Pack rows. Some may begin with a prompt that they share."""
    tokens = Ragged.of([[*row, 0] for row in rows], np.int32)
    shared = [len(_PROMPT) if tuple(row[: len(_PROMPT)]) == _PROMPT else 0 for row in rows]
    mask = Ragged.of([np.arange(len(row) + 1) >= own for row, own in zip(rows, shared, strict=True)], np.bool_)
    (micro,) = model.split(tokens, whole(tokens, mask), None, len(tokens.values))
    return micro.to(model.device)


def _padded(model: "LanguageModel") -> PaddedRows:
    """Prove that the rows of a padded pass are those of the model alone, with the first attention that does it."""
    rows, network, name = [_LONG, _OWN], model.network, type(model.network).__name__
    with torch.no_grad():
        try:
            network.set_attn_implementation("eager")
            eager = replace(model, layout=PaddedRows("eager"))
            wanted = [_states(eager, [row])[0] for row in rows]
            for kind in ("sdpa", "eager"):
                try:
                    network.set_attn_implementation(kind)
                except (ValueError, ImportError):  # a model without it
                    continue
                got = _states(replace(model, layout=PaddedRows(kind)), rows)
                same = all(_close(own[: len(row)], alone) for own, row, alone in zip(got, rows, wanted, strict=True))
                if same and _reads_far(eager, wanted[1]):
                    return PaddedRows(kind)
        except ModelError:
            raise
        except Exception as error:
            raise _unreadable(name) from error
    raise ModelError(
        f"{name} computes something else for a row next to a longer one (it is not causal, or its positions depend on "
        "the longest row): choose a decoder, such as a Llama or a Qwen3"
    )


def _unreadable(name: str) -> ModelError:
    return ModelError(
        f"{name} cannot be read: its code does not compute the states of token ids alone, or logits of states alone, "
        "as other decoders do. Choose one of those, such as a Llama or a Qwen3"
    )


def _reads_far(model: "LanguageModel", alone: Tensor) -> bool:
    """True if a row has the same states next to one that reaches the model's last positions."""
    last = max(len(_OWN) + 1, min(model.max_tokens, _FARTHEST) - 1)
    positions = torch.tensor([[*range(len(_OWN)), last - 1, last]], device=model.device)
    model.begin(None, positions >= model.native_tokens if last >= model.native_tokens else None)
    try:
        read = model.body(input_ids=_ids(model, [(*_OWN, *_LAST)]), position_ids=positions, use_cache=False)
    except Exception:  # noqa: BLE001 - a model that is told no positions, or has fewer
        return True
    return _close(cast("Tensor", read.last_hidden_state)[0, : len(_OWN)], alone)


def _ids(model: "LanguageModel", rows: Sequence[Sequence[int]]) -> Tensor:
    longest = max(map(len, rows))
    padded = [[*row, *[row[-1]] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, device=model.device) % model.known


def _states(model: "LanguageModel", rows: Sequence[Sequence[int]]) -> Tensor:
    ids = _ids(model, rows)
    return model.hidden(ids, torch.arange(ids.shape[1], device=model.device).expand_as(ids), Packed(()))


def is_close(model: "LanguageModel", one: Tensor, other: Tensor) -> bool:
    """True if states differ by no more than rounding, in the dtype of a model's weights."""
    dtype = _dtype(model)
    return _close(one, other, 10 * _ROUNDING if dtype == torch.float32 else math.sqrt(torch.finfo(dtype).eps))


def _close(one: Tensor, other: Tensor, tolerance: float = 10 * _ROUNDING) -> bool:
    return torch.equal(one, other) or torch.allclose(
        one, other, rtol=0, atol=tolerance * float(other.abs().max()), equal_nan=False
    )


def _dtype(model: "LanguageModel") -> torch.dtype:
    return cast("nn.Embedding", model.network.get_input_embeddings()).weight.dtype


def stand_in(network: PreTrainedModel, longest: int) -> PreTrainedModel:
    """Make a network of the same architecture in float32, with made-up values that take almost no memory.

    Each matrix shows one short vector at a different place in each row. Layers after the last that differs from those
    before it are left out. Windows that are shorter than the `longest` row are shorter than the rows of a proof.
    """
    config = copy.deepcopy(network.config)
    for part in (config, config.get_text_config()):
        for key, value in (_WINDOWS | _LIMITS).items():
            had = getattr(part, key, None)
            if isinstance(had, int | float) and (key in _LIMITS or had < longest):
                setattr(part, key, value)
    with MAKING, WithoutValues():
        made: PreTrainedModel = type(network)._from_config(config, **_PLAIN)  # noqa: SLF001
    made.train(False)
    _shorten(made, int(config.get_text_config().num_hidden_layers))
    random, head = torch.Generator().manual_seed(0), made.get_output_embeddings()
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = _values(parameter.shape, random, is_bias=name.endswith("bias"))
            if module is head:
                values = values[:_KNOWN]
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return made


def _values(shape: torch.Size, random: torch.Generator, *, is_bias: bool) -> Tensor:
    if len(shape) < 2:
        return torch.randn(shape, generator=random) * 0.1 + (0.0 if is_bias else 1.0)
    shared = torch.randn(sum(shape), generator=random) / math.sqrt(shape[-1])
    return shared.as_strided(shape, (1,) * len(shape))


def _shorten(network: nn.Module, layers: int) -> None:
    """Leave out the layers after the last that differs from all before it."""
    for parent in list(network.modules()):
        for name, blocks in list(parent.named_children()):
            if isinstance(blocks, nn.ModuleList) and len(blocks) == layers:
                kinds = [_kind(block) for block in blocks]
                setattr(parent, name, blocks[: 1 + max(map(kinds.index, kinds))])


def _kind(block: nn.Module) -> str:
    """Return what a layer consists of, without its number."""
    facts = [
        (key, value)
        for module in block.modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and key not in ("layer_idx", "layer_id", "training")
    ]
    return f"{block}{facts}"
