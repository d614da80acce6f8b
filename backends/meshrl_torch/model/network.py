"""A language model with its tokenizer, and its forward pass over packed sequences."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshrl.data import Batch, Ragged
from meshrl.errors import ModelError
from meshrl.roles import Packing
from meshrl_torch.model.adapted import Adapters, Names, Reading, Uses, own_name, reading
from meshrl_torch.model.attention import Attend, Kernel, Packed
from meshrl_torch.model.layout import PACKED, Layout
from meshrl_torch.model.linear import use_onednn
from meshrl_torch.model.masks import restricted
from meshrl_torch.model.mixers import Batches, Mixers
from meshrl_torch.model.packing import MicroBatch, Rows, micro_batches
from meshrl_torch.model.positions import ANY, Rotaries
from meshrl_torch.model.proof import proved, read_padded, stand_in
from meshrl_torch.model.routing import Routers, Routes
from meshrl_torch.model.text import Template, Words, words
from meshrl_torch.model.vision import Taken, Vision, images_of, vision_modules

MAX_LOGITS: Final = 1 << 26
"""Logits made at once, 256 MiB in float32. More are made in chunks, and made again for the backward pass.

Each chunk adds to the head's gradient, which is as large as the head, so smaller chunks would do little else.
"""

_AT_ONCE: Final = 1 << 22
"""Probabilities that are held in addition to their logarithms, few enough to stay in a cache."""


@dataclass(frozen=True)
class LanguageModel(Words):
    """A model, its tokenizer, and their operations for roles."""

    network: PreTrainedModel
    head: PreTrainedModel
    """The model without its body, with shared parameters: it computes logits from the last hidden states."""
    kernel: Kernel | None = None
    """The kernel for packed sequences. None: SDPA."""
    routers: Routers | None = None
    """The routers of a mixture of experts."""
    rotaries: Rotaries | None = None
    """The rotary embeddings, if they depend on a row's length."""
    mixers: Mixers | None = None
    """What reads the segments of a packed pass as rows."""
    layout: Layout = PACKED
    """How it reads the rows of a pass."""
    adapters: Adapters | None = None
    """The adapters of a model that is frozen otherwise."""

    @property
    def body(self) -> PreTrainedModel:
        """The network without its head."""
        return body_of(self.network)

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.network.device

    def split(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Divide rows into micro-batches of at most `budget` tokens, as its layout does.

        Mixers read what rows share again for each row, so there it counts for each. They and the head have other tokens
        than the rest of the body, so there rows of several adapters are not mixed.
        """
        adapters = self.adapters
        if adapters is not None and adapters.mixes and not (adapters.in_head or self.mixers is not None):
            rows = replace(rows, mixed=True)
        if self.mixers is not None and self.layout is PACKED:
            return micro_batches(tokens, rows, learn, budget, repeats=True)
        return self.layout.split(tokens, rows, learn, budget)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        routes: Routes | None = None,
        beyond: Tensor | None = None,
        uses: Uses | None = None,
        images: Taken | None = None,
    ) -> Tensor:
        """Return the last hidden states [batch, tokens, hidden] of ids and positions, int64[batch, tokens].

        `beyond`, bool[batch, tokens]: the tokens of rows longer than `native_tokens`. None: no row is. `uses`: the
        adapters of this pass, and of the head for its states. None: the default one. `images`: as `seen` returns them.
        """
        self.begin(routes, beyond, uses)
        if self.mixers is not None and self.layout is PACKED:
            self.mixers.batches = Batches.of(attend, ids.device)
        attend = attend.by(self.kernel) if isinstance(attend, Packed) else attend
        states = self.layout.read(self.body, ids, positions, attend, images)
        if self.vision is None or not torch.is_grad_enabled():
            return states
        eyes = (
            each
            for module in vision_modules(self.network).values()
            for each in module.parameters()
            if each.requires_grad
        )
        zeros = [each.flatten()[:1].sum() * 0 for each in eyes]  # each has a gradient, also in a pass without images
        return states + torch.stack(zeros).sum().to(states.dtype) if zeros else states

    def seen(self, batch: Batch, micro: MicroBatch) -> Taken | None:
        """Return what the body takes for the images of a micro-batch, on the model's device. None if it has none."""
        taken = None if self.vision is None else self.vision.inputs(self.body, batch, micro)
        return None if taken is None else taken.to(self.device)

    def begin(self, routes: Routes | None, beyond: Tensor | None, uses: Uses | None = None) -> None:
        """Begin a pass: its tokens' experts and adapters, and which are in rows longer than `native_tokens`."""
        if self.adapters is not None:
            self.adapters.begin(uses)
        if self.routers is not None:
            self.routers.routes = routes
        if self.rotaries is not None:
            self.rotaries.beyond = beyond
        if self.mixers is not None:
            self.mixers.batches = None

    def reading(self, names: Names | None) -> Reading | None:
        """Return who reads tokens, by the name of each one's adapter. None without adapters, or for the default one."""
        return reading(names, self.device) if self.adapters and self.adapters.named and names is not None else None

    def logits(self, hidden: Tensor, uses: Reading | None = None) -> Tensor:
        """Return float32[tokens, vocabulary] from hidden states [tokens, hidden]. `uses`: if not as the pass began."""
        if self.adapters is not None and uses is not None:
            self.adapters.uses = self.adapters.uses._replace(head=uses)
        return self._logits(hidden).float()

    def logprobs(
        self, hidden: Tensor, chosen: Tensor, temperature: Tensor | None, allowed: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability of each chosen token, float32[tokens], at a temperature for each.

        `allowed`: bits of the tokens that each was chosen from, int32[tokens, numbers]. None: from all.


        If gradients are kept, returns float32[tokens, 2]: also the entropy of the distribution, in nats, without a
        gradient. `hidden` is [tokens, hidden], of the tokens that predict. More than MAX_LOGITS logits are made in
        chunks, so memory does not grow with tokens times vocabulary.
        """
        vocabulary = int(self.network.config.get_text_config().vocab_size)
        return in_chunks(self._chosen, vocabulary, hidden, chosen, temperature, allowed)

    def _chosen(
        self, hidden: Tensor, chosen: Tensor, temperature: Tensor | None, allowed: Tensor | None = None
    ) -> Tensor:
        logprobs_of = cast("Callable[[Tensor, Tensor, Tensor | None], Tensor]", _ChosenLogProbs.apply)
        logits = self._logits(hidden)
        return logprobs_of(logits if allowed is None else restricted(logits, allowed), chosen, temperature)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits in the head's dtype."""
        return cast("Tensor", self.head(inputs_embeds=hidden[None], use_cache=False).logits)[0]

    def check_rows(self, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch: too long a row, an unknown token id, or images."""
        tokens, ids = batch.tokens, np.asarray(batch.tokens.values, np.int64)
        wrong = (ids < 0) | (ids >= self.known)
        rows = [*np.flatnonzero(tokens.lengths > self.max_tokens)]
        rows += [*(np.searchsorted(tokens.offsets, np.flatnonzero(wrong)[:1], side="right") - 1)]
        for row in rows[:1]:
            self.check_row(tokens[int(row)].tolist(), batch.place(int(row)))
        if self.vision is not None:
            self.vision.check(batch)
        else:
            images = images_of(batch) or ()
            for row in [row for row, names in enumerate(images) if names][:1]:
                self.put("", images[row], None, batch.place(row))

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's parameters and saved buffers by name, tied ones once. Writing to them changes the model.

        Adapters are not part of them.
        """
        once: dict[tuple[int, torch.Size, torch.dtype], tuple[str, Tensor]] = {}
        for name, tensor in cast("dict[str, Tensor]", self.network.state_dict()).items():
            own = own_name(name) if self.adapters else name
            once.setdefault((tensor.data_ptr(), tensor.shape, tensor.dtype), (own, tensor))
        return dict(once.values())


def in_chunks(
    compute: Callable[..., Tensor], columns: int, hidden: Tensor, chosen: Tensor, *others: Tensor | None
) -> Tensor:
    """Return `compute(hidden, chosen, *others)`, whose logits of all columns are at most MAX_LOGITS at once.

    Each of `others`, such as the temperature, has a value for each token. Several chunks are computed again in the
    backward pass.
    """
    rows = max(1, MAX_LOGITS // columns)
    if len(hidden) <= rows:
        return compute(hidden, chosen, *others)
    pieces: list[Tensor] = []
    for start in range(0, len(hidden), rows):
        span = slice(start, start + rows)
        own = [None if each is None else each[span] for each in others]
        pieces.append(cast("Tensor", checkpoint(compute, hidden[span], chosen[span], *own, use_reentrant=False)))
    return torch.cat(pieces)


def to_probabilities(logprobs: Tensor) -> Tensor:
    """Convert log-probs, float32[tokens, vocabulary], to probabilities in place. Returns entropies in nats."""
    sums: list[Tensor] = []
    for part in logprobs.split(max(1, _AT_ONCE // max(1, logprobs.shape[1]))):
        probabilities = part.exp()
        # For probability 0 the product must be 0, not that of 0 and infinity.
        sums.append(part.clamp_(min=torch.finfo(part.dtype).min).mul_(probabilities).sum(-1))
        part.copy_(probabilities)
    return torch.cat(sums).neg_()


class _ChosenLogProbs(torch.autograd.Function):
    """Returns the log-prob of each chosen token, from logits of any dtype, and the entropy if a gradient is needed.

    In addition to the logits it holds one float32 tensor of their size, which the backward pass turns into their
    gradient. Autograd would hold three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
        scaled = logits if temperature is None else logits / temperature[:, None]  # float32, as temperatures are
        logprobs = scaled.log_softmax(-1, dtype=torch.float32)
        own = logprobs.gather(1, chosen[:, None])[:, 0]
        if not ctx.needs_input_grad[0]:
            return own
        entropy = to_probabilities(logprobs)
        ctx.save_for_backward(logprobs, chosen, temperature)
        ctx.dtype = logits.dtype
        return torch.stack([own, entropy], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, chosen, temperature = ctx.saved_tensors
        given = gradients[0][:, 0]
        own = given if temperature is None else given / temperature
        result = probabilities.mul_(-own[:, None]).scatter_add_(1, chosen[:, None], own[:, None])
        return result.to(ctx.dtype), None, None


def ready(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: Template | None,
    packing: Packing = "auto",
    vision: Vision | None = None,
) -> LanguageModel:
    """Set up a loaded network: no randomness in its forward pass, and rows that do not see each other.

    How a network without values reads rows is chosen later, by `with_layout`.
    """
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the sampler's log-probs must be the trainer's
    network.train(False)
    use_onednn(network)
    own = words(tokenizer, network.config, getattr(network, "generation_config", None), chat, vision)
    routers = Routers.of(network)
    rotaries = Rotaries(network, own.native_tokens) if own.native_tokens < ANY else None
    model = LanguageModel(
        own.tokenizer,
        own.chat,
        own.ends,
        own.max_tokens,
        network,
        headless(network),
        routers=routers,
        rotaries=rotaries,
        native_tokens=own.native_tokens,
        known=len(cast("nn.Embedding", network.get_input_embeddings()).weight),
        vision=vision,
    )
    if tokenizer.vocab_size > model.known:  # unused added tokens may be beyond
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path} has {tokenizer.vocab_size} tokens and the model {model.known}: "
            "they do not belong together"
        )
    if network.device.type != "meta":
        return with_layout(model, packing)
    network.set_attn_implementation(PACKED.attention)
    return model


def with_layout(model: LanguageModel, packing: Packing) -> LanguageModel:
    """Choose how a model reads rows, by what it computes. See `proved`.

    Rows of a model that sees are padded: packed ones are proved for texts alone. ModelError if a table asks for these.
    """
    if model.vision is not None:
        if packing == "packed":
            raise ModelError(
                f"{type(model.network).__name__} sees images, and packed rows are proved for texts alone: set "
                'packing = "auto" to read them padded'
            )
        packing = "padded"
    model = proved(model, packing, partial(_with_network, model))
    model.network.set_attn_implementation(model.layout.attention)
    return model


def as_its_values_allow(model: LanguageModel, fault: ModelError | None, packing: Packing) -> LanguageModel:
    """Return a model that packs rows, or pads them if it must not pack them with its values, for the reason `fault`.

    ModelError if a table asks for packed rows.
    """
    if fault is None:
        return model
    model = read_padded(model, fault, packing, partial(_with_network, model))
    model.network.set_attn_implementation(model.layout.attention)
    return model


def stand_in_of(model: LanguageModel) -> LanguageModel:
    """Return a model of the same architecture in float32, with short windows. See `stand_in`."""
    return _with_network(model, stand_in(model.network, model.max_tokens))


def _with_network(model: LanguageModel, network: PreTrainedModel) -> LanguageModel:
    rotaries = Rotaries(network, model.native_tokens) if model.native_tokens < ANY else None
    mixers = Mixers(network, model.mixers.kinds) if model.mixers else None
    return replace(
        model,
        network=network,
        head=headless(network),
        routers=Routers.of(network),
        rotaries=rotaries,
        mixers=mixers,
        kernel=None,
    )


class _BodyOutput:
    """The result of a body: its last hidden states, and None for anything else that a head reads."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _FixedBody(nn.Module):
    """Replaces a model's body, and a body inside, and returns given hidden states. It has the body's attributes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # no part of the head

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        own = self.__dict__.get("_body")
        value = cast("Tensor | nn.Module", super().__getattr__(name) if own is None else getattr(own[0], name))
        return self if isinstance(value, PreTrainedModel) else value

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


def headless(network: PreTrainedModel) -> PreTrainedModel:
    """Return the network without its body, so that its code (scaling, capping) makes the logits."""
    body, head = body_of(network), copy.copy(network)
    name = next(name for name, each in network.named_children() if each is body)
    head.__dict__["_modules"] = {**network._modules, name: _FixedBody(body)}  # noqa: SLF001
    return head


def body_of(network: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a network that computes hidden states. ModelError if it has none apart from its head."""
    inside = [each for each in network.children() if isinstance(each, PreTrainedModel)]
    found = [each for each in inside if each is network.base_model] or inside
    if len(found) != 1:
        raise ModelError(f"{type(network).__name__} has no body apart from its head")
    return found[0]
