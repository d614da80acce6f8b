"""Weights that a policy's ranks broadcast from their shards, bucket by bucket, as a value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, cast

import torch
from torch import Tensor

from meshrl import log
from meshrl.data import Bucket, Probe, Weights
from meshrl.errors import ConfigError, DataError, DataLost, ModelError
from meshrl.mesh import Put, Rows, current_rank
from meshrl.roles import PolicyConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.loading import config_of, without_values
from meshrl_torch.model.scoring import Passes
from meshrl_torch.weights.sender import Sender
from meshrl_torch.weights.transfer import Form, array_of, check_forms
from meshrl_torch.wire import fp8
from meshrl_torch.wire.collective import nbytes_of, place_in
from meshrl_torch.wire.manifest import Offer, Part, Source
from meshrl_torch.wire.reader import Damaged, Lost, Reader


class LiveWeights(Weights):
    """Weights that stay where the policy trains them. Each reader receives them on first use.

    They are available until the policy's next update, and later readers get `DataLost`. A reader either pours them into
    its tensors, which takes only the memory of buckets, or reads them whole like any others.
    """

    _offer: Offer
    _together: int
    """Number of ranks that read together."""
    _way: str
    """How they came, such as "by gloo". Empty until they have arrived."""
    _whole: Sequence[Bucket] | None
    """All tensors, after the first use."""

    @classmethod
    def offered(cls, version: int, probe: Probe | None, offer: Offer, together: int = 1) -> Self:
        """Make weights from an offer. `together`: number of ranks that read them at once."""
        self = cls.of(version, (), probe)
        self._offer, self._together, self._way, self._whole = offer, together, "", None
        return self

    @classmethod
    def join(cls, parts: Sequence[Weights], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """Join the parts of all ranks. DataError if versions differ."""
        live = cast("Sequence[LiveWeights]", parts)
        versions = [part.version for part in live]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they made different updates")
        offers = [part._offer for part in live]  # noqa: SLF001 -- of this class
        sources = tuple(source for offer in offers for source in offer.sources)
        return cls.offered(versions[0], live[0].probe, offers[0]._replace(sources=sources))

    def read_by(self, together: int) -> Self:
        """Return the same weights for `together` ranks that receive each byte at once."""
        return self.offered(self.version, self.probe, self._offer, together)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The whole tensors, received on first use. DataLost if they are no longer available."""
        if self._whole is None:
            self.check_quantized("")
            dtype = getattr(torch, self._offer.dtype)
            made = {name: torch.empty(form.shape, dtype=dtype) for name, form in self._forms.items()}
            self._pour(made)
            arrays = {name: array_of(tensor) for name, tensor in made.items()}
            self._whole = Weights(self.version, arrays).buckets
        return self._whole

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(nbytes_of(part) for part in self._offer.parts)

    @property
    def ways(self) -> frozenset[str]:
        """That they are broadcast, and how, once they have arrived."""
        return frozenset((f"broadcast {self._way}" if self._way else "broadcast",))

    @property
    def lasts(self) -> bool:
        """False: they are gone with the policy's next update."""
        return False

    async def load(self) -> Self:
        """Return the same weights, which are received on use."""
        return self

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Return the same weights, which stay in the policy."""
        return self

    def with_version(self, version: int) -> Self:
        """Return the same tensors with another version."""
        return self.offered(version, self.probe, self._offer, self._together)

    @property
    def offer(self) -> Offer:
        """What the policy's ranks send."""
        return self._offer

    @property
    def together(self) -> int:
        """Number of ranks that read them at once."""
        return self._together

    def arrived(self, way: str) -> None:
        """Note how they came to this rank, such as "by gloo"."""
        self._way = way

    def pour(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        """Copy all into a model's tensors, bucket by bucket. Calls `begin` before the first write.

        Raises ModelError, and copies nothing, if they belong to another model. Later errors leave some tensors old:
        ModelError if a bucket differs from the sent bytes, DataLost if some never arrive.
        """
        self.check_quantized("")
        own = {name: Form(array_of(tensor).dtype.name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        check_forms(own, self._forms, self.version)
        self._pour(tensors, begin)

    def _pour(self, tensors: Mapping[str, Tensor], begin: Callable[[], None] = lambda: None) -> None:
        def warn(attempt: int, error: str) -> None:
            log.warning("weights arrived incomplete", version=self.version, attempt=attempt, error=error)

        try:
            self.arrived(_reader.read(self._offer, self._together, _InPlace(tensors, begin), warn))
        except Lost as lost:
            raise self.lost(lost.where, lost.reason) from None
        except Damaged as damaged:
            raise ModelError(
                f"weights of version {self.version} did not arrive as they were sent: {damaged}. Publish them again"
            ) from None

    def check_quantized(self, quantized: str) -> None:
        """Raise ModelError if matrices are sent in FP8, and a reader's are not `quantized` to "fp8"."""
        if self._offer.in_fp8 and quantized != "fp8":
            raise ModelError(
                f"the matrices of version {self.version} come in FP8, which only samplers that compute in FP8 take: "
                "no other sampler, and no reference. Remove policy.weight_sync_dtype"
            )

    @property
    def _forms(self) -> Mapping[str, Form]:
        return {name: Form(self._offer.dtype, shape) for name, shape in self._offer.shapes.items()}

    def lost(self, where: str, reason: str) -> DataLost:
        """Return the error for weights that did not arrive: who has not sent them, and why."""
        return DataLost(where, reason, f"the weights of version {self.version}")

    def __reduce__(self) -> tuple[Callable[..., "LiveWeights"], tuple[object, ...]]:
        return _received, (self.version, self.probe, self._offer, self._together)

    def __repr__(self) -> str:
        return f"LiveWeights(version {self.version}, {self.nbytes:,} bytes in the policy)"


class _InPlace:
    """A model whose tensors are written in place."""

    def __init__(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        self._tensors, self.begin = tensors, begin
        self.device: Final = next(iter(tensors.values())).device

    def place(self, part: Part) -> Tensor:
        """Return a view of a part in its tensor."""
        return place_in(self._tensors[part.name], part)

    def arrived(self, part: Part) -> None:
        """Nothing is left to do."""


_reader: Final = Reader()


def sender(config: PolicyConfig, passes: Passes) -> Sender:
    """Make the sender of a policy's rank. All ranks make theirs together."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return Sender(passes.ranks, current_rank(), passes.model.device, dtype, config.bucket_mib << 20, _in_fp8(config))


def _in_fp8(config: PolicyConfig) -> frozenset[str]:
    """Return the names of the matrices that are sent in FP8. ConfigError if the model cannot be in FP8."""
    if config.weight_sync_dtype != "fp8":
        return frozenset()
    network = without_values(config_of(config))
    if refusal := fp8.refusal(network):
        raise ConfigError(f"{refusal}. Remove policy.weight_sync_dtype")
    return fp8.matrices(network)


def offered(sender: Sender, version: int, probe: Probe | None, shards: Iterable[Box]) -> LiveWeights:
    """Offer a rank's shards to readers."""
    key, layouts = sender.offer(shards)
    source = Source(sender.number, layouts)
    return LiveWeights.offered(version, probe, Offer(sender.place, key, sender.dtype, (source,)))


def _received(version: int, probe: Probe | None, offer: Offer, together: int) -> LiveWeights:
    return LiveWeights.offered(version, probe, offer, together)
