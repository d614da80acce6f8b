"""Weights that a policy's ranks broadcast from their shards, bucket by bucket, as a value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
from meshrl_torch.weights.transfer import TensorSpec, array_of, check_specs, specs_of
from meshrl_torch.wire import fp8
from meshrl_torch.wire.bucket_bytes import nbytes_of, place_in
from meshrl_torch.wire.manifest import Manifest, Part, RankBuckets
from meshrl_torch.wire.plan import ConflictError
from meshrl_torch.wire.reader import Damaged, Lost, Reader
from meshrl_torch.wire.wide import is_wide


class LiveWeights(Weights):
    """Weights that stay where the policy trains them. Each reader receives them on first use.

    They are available until the policy's next update, and later readers get `DataLost`. A reader either loads them into
    its tensors, which takes only the memory of buckets, or reads them whole like any others.
    """

    manifest: Manifest
    together: int
    """Number of ranks that read them at once."""
    _transport: str
    """How they arrived, such as "by gloo". Empty before."""
    _whole: Sequence[Bucket] | None
    """All tensors, after the first use."""

    @classmethod
    def offered(cls, version: int, probe: Probe | None, manifest: Manifest, together: int = 1) -> Self:
        """Make weights from a manifest. `together`: number of ranks that read them at once."""
        self = cls.of(version, (), probe)
        self.manifest, self.together, self._transport, self._whole = manifest, together, "", None
        return self

    @classmethod
    def join(cls, parts: Sequence[Weights], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """Join the parts of all ranks. DataError if versions differ."""
        live = cast("Sequence[LiveWeights]", parts)
        versions = [part.version for part in live]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they made different updates")
        sources = tuple(source for part in live for source in part.manifest.sources)
        return cls.offered(versions[0], live[0].probe, live[0].manifest._replace(sources=sources))

    def read_by(self, together: int) -> Self:
        """Return the same weights for `together` ranks that receive each byte at once."""
        return self.offered(self.version, self.probe, self.manifest, together)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The whole tensors, received on first use. DataLost if they are no longer available."""
        if self._whole is None:
            self.check_quantized("")
            dtypes = {name: getattr(torch, dtype) for name, dtype in self.manifest.dtypes.items()}
            tensors = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in self.manifest.shapes.items()}
            self._receive(tensors, lambda: None)
            arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
            self._whole = Weights(self.version, arrays).buckets
        return self._whole

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(nbytes_of(part) for part in self.manifest.parts)

    @property
    def transports(self) -> frozenset[str]:
        """That they are broadcast, and how, once they have arrived."""
        return frozenset((f"broadcast {self._transport}".rstrip(),))

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
        return self.offered(version, self.probe, self.manifest, self.together)

    def arrived(self, transport: str) -> None:
        """Record how they came to this rank, such as "by gloo"."""
        self._transport = transport

    def load_into(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        """Copy all into a model's tensors, bucket by bucket. Calls `begin` before the first write.

        Raises ModelError, and copies nothing, if they belong to another model. Later errors leave some tensors old:
        ModelError if a bucket differs from the sent bytes, DataLost if some never arrive.
        """
        self.check_quantized("")
        dtypes = self.manifest.dtypes
        given = {name: TensorSpec(dtypes[name], shape) for name, shape in self.manifest.shapes.items()}
        check_specs(specs_of({name: array_of(tensor) for name, tensor in tensors.items()}), given, self.version)
        self._receive(tensors, begin)

    def _receive(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        def warn(attempt: int, error: str) -> None:
            log.warning("weights arrived incomplete", version=self.version, attempt=attempt, error=error)

        try:
            self.arrived(_reader.read(self.manifest, self.together, InPlace(tensors, begin), warn))
        except Lost as lost:
            raise self.lost(lost.where, lost.reason) from None
        except ConflictError as conflict:
            raise ConfigError(f"{self!r} cannot be sent: {conflict}") from None
        except Damaged as damaged:
            raise ModelError(
                f"weights of version {self.version} did not arrive as they were sent: {damaged}. Publish them again"
            ) from None

    def check_quantized(self, quantized: str) -> None:
        """Raise ModelError if matrices are sent in FP8, and a reader's are not `quantized` to "fp8"."""
        if self.manifest.in_fp8 and quantized != "fp8":
            raise ModelError(
                f"the matrices of version {self.version} come in FP8, which only samplers that compute in FP8 take: "
                "no other sampler, and no reference. Remove policy.weight_sync_dtype"
            )

    def lost(self, where: str, reason: str) -> DataLost:
        """Return the error for weights that did not arrive: who has not sent them, and why."""
        return DataLost(where, reason, f"the weights of version {self.version}")

    def __reduce__(self) -> tuple[Callable[..., "LiveWeights"], tuple[object, ...]]:
        return LiveWeights.offered, (self.version, self.probe, self.manifest, self.together)

    def __repr__(self) -> str:
        return f"LiveWeights(version {self.version}, {self.nbytes:,} bytes in the policy)"


class InPlace:
    """A model whose tensors are written in place: a `Destination`."""

    def __init__(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        self._tensors, self.begin = tensors, begin
        self.device: Final = next(iter(tensors.values())).device

    def place(self, part: Part) -> Tensor:
        """Return a view of a part in its tensor."""
        return place_in(self._tensors[part.name], part)

    def arrived(self, part: Part) -> None:
        """Nothing is left to do."""


_reader: Final = Reader()


def make_sender(config: PolicyConfig, passes: Passes) -> Sender:
    """Make the sender of a policy's rank. All ranks make theirs together.

    ConfigError if matrices are to be sent in FP8 and the model cannot be in FP8.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    matrices = frozenset[str]()
    if config.weight_sync_dtype == "fp8":
        network = without_values(config_of(config))
        if refusal := fp8.refusal(network):
            raise ConfigError(f"{refusal}. Remove policy.weight_sync_dtype")
        matrices = fp8.matrices(network)
    wide = partial(is_wide, passes.model.network)
    return Sender(passes.ranks, current_rank(), passes.model.device, dtype, config.bucket_mib << 20, matrices, wide)


def offer_weights(sender: Sender, version: int, probe: Probe | None, shards: Iterable[Box]) -> LiveWeights:
    """Offer a rank's shards to readers."""
    key, layouts = sender.offer(shards)
    source = RankBuckets(sender.number, layouts)
    return LiveWeights.offered(version, probe, Manifest(sender.address, key, sender.dtype, (source,)))
