"""What clients ask of a model or a sampler: the API's requests, from JSON or from protocol buffers.

A request has the same form however it came: so it is written to a journal, read again, and compared with a repetition.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.errors import DataError
from meshrl.mesh import Array
from meshrl.remote import Call
from meshrl.tinker import wire

T = TypeVar("T")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Metadata: TypeAlias = dict[str, object]
SPACE: Final = 64 << 20
"""Bytes that the sparse tensors of a body may have once they are whole, unless its reader says how many."""
_TYPES: Final[Mapping[int, str]] = {0: "float32", 1: "float32", 2: "int64", 3: "int32"}
"""Names of dtypes by their number in the wire format. 0: it was left out."""
_MOST: Final = 1 << 31
"""Counts are below this."""


class Space:
    """The bytes that the sparse tensors of one body may have once they are whole."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = nbytes

    def take(self, shape: Sequence[int], dtype: str) -> None:
        """Take what a tensor needs. DataError if that is more than is left."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > self._left:
            raise DataError(
                f"a sparse tensor of shape {list(shape)} has {nbytes} bytes once it is whole, and {self._left} of "
                f"{self._nbytes} are left for the body: send fewer or smaller ones"
            )
        self._left -= nbytes


class Tensor(msgspec.Struct, frozen=True):
    """An array: its bytes, the name of its dtype, and its shape."""

    data: bytes
    dtype: Literal["float32", "int64", "int32"]
    shape: tuple[Count, ...]

    @property
    def array(self) -> Array:
        """The values, of any shape. DataError if there are more or fewer bytes than the shape needs."""
        if math.prod(self.shape) * np.dtype(self.dtype).itemsize != len(self.data):
            raise DataError(
                f"a tensor {self.dtype}{list(self.shape)} has {len(self.data)} bytes: send its whole values"
            )
        try:
            return np.frombuffer(self.data, self.dtype).reshape(self.shape)
        except ValueError as error:
            raise DataError(f"a tensor of shape {list(self.shape)} cannot be made: {error}") from error

    @classmethod
    def of(cls, values: Sequence[int | float], dtype: str, shape: Sequence[int] | None) -> "Tensor":
        """Make a tensor of a list. Without a shape it is one-dimensional."""
        kind: Literal["float32", "int64"] = "int64" if dtype == "int64" else "float32"
        try:
            data = np.array(values, kind).tobytes()
        except (OverflowError, TypeError, ValueError) as error:
            raise DataError(f"a tensor {dtype} cannot have these values: {error}") from error
        return cls(data, kind, tuple(shape) if shape is not None else (len(values),))


def concatenated(tensors: Sequence[Tensor]) -> Array:
    """Return the values of one-dimensional tensors, one after the other. DataError as `Tensor.array`."""
    first = tensors[0].dtype
    size = np.dtype(first).itemsize
    if all(each.dtype == first and len(each.data) == size * each.shape[0] for each in tensors):
        return np.frombuffer(b"".join([each.data for each in tensors]), first)
    return np.concatenate([each.array for each in tensors])


class Datum(msgspec.Struct, frozen=True):
    """A row: the tokens that the model reads, and the tensors that the loss reads, sorted by name."""

    tokens: bytes
    """int32."""
    inputs: dict[str, Tensor]

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens, int32[tokens]. DataError if there is a part of one."""
        if len(self.tokens) % 4:
            raise DataError(f"{len(self.tokens)} bytes are no whole number of int32 tokens")
        return np.frombuffer(self.tokens, np.int32)


class Pass(msgspec.Struct, frozen=True, tag="pass"):
    """Run the model over rows, and with `backward` add the loss's gradients."""

    model_id: str
    seq_id: Count
    loss: str
    config: dict[str, float | str]
    data: list[Datum]
    backward: bool


class Adam(msgspec.Struct, frozen=True):
    """The optimizer's values for one step, with the SDK's defaults."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-12
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0: no clipping."""


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """Make a step with the gradients so far."""

    model_id: str
    seq_id: Count
    adam_params: Adam | None = None
    optimizer_params: dict[str, object] | None = None
    """Those of another optimizer."""


class Save(msgspec.Struct, frozen=True, tag="save_weights"):
    """Keep the weights and the optimizer's state under a name."""

    model_id: str
    seq_id: Count
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: Count | None = None
    user_metadata: dict[str, str] | None = None


class SaveForSampler(msgspec.Struct, frozen=True, tag="save_weights_for_sampler"):
    """Keep the weights for samplers: under a name, or for a new sampling session."""

    model_id: str
    seq_id: Count
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    ttl_seconds: Count | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(msgspec.Struct, frozen=True, tag="save_weights_external"):
    """Keep the weights as other libraries read them, to be downloaded."""

    model_id: str
    seq_id: Count
    path: str
    ttl_seconds: Count | None = None
    age_encryption_recipients: list[str] | None = None


class Optimizer(msgspec.Struct, frozen=True):
    """The kind of an optimizer."""

    type: str = "adamw"


class Lora(msgspec.Struct, frozen=True):
    """The adapters of a new model."""

    rank: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Create(msgspec.Struct, frozen=True, tag="create_model"):
    """Make a new model of a session."""

    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: Lora | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = Optimizer()


class Load(msgspec.Struct, frozen=True, tag="load_weights"):
    """Load what was saved, into a model, or into a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Count | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that could be read only as far as its number, which it takes all the same."""

    model_id: str
    seq_id: Count
    error: str


Request: TypeAlias = Pass | OptimStep | Save | SaveForSampler | SaveExternal | Create | Load | Refused | Call
"""A request that changes a model, or has its place among those that do."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a prompt."""

    type: str = "encoded_text"
    tokens: list[Count] = []


class ModelInput(msgspec.Struct, frozen=True):
    """A prompt in pieces."""

    chunks: list[Chunk]

    @property
    def tokens(self) -> list[int]:
        """The tokens of all pieces. DataError if one is no text."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise DataError(f"a piece of the input is of the type {chunk.type!r}: this server reads text alone")
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn."""

    max_tokens: Annotated[int, msgspec.Meta(gt=0, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: str | list[str | Count] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class JsonTensor(msgspec.Struct, frozen=True):
    """An array as JSON has it."""

    data: list[int | float]
    dtype: Literal["float32", "int64"]
    shape: list[Count] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def packed(self, space: Space | None = None) -> Tensor:
        """Return the same values as bytes. A sparse tensor takes from `space`, by default `SPACE` bytes."""
        if self.sparse_crow_indices is None:
            return Tensor.of(self.data, self.dtype, self.shape)
        indices = (self.sparse_crow_indices, self.sparse_col_indices or [])
        rows, columns = (Tensor.of(each, "int64", None).array for each in indices)
        values = Tensor.of(self.data, self.dtype, None).array
        return _dense(values, rows, columns, self.shape or [], space or Space(SPACE))


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Draw completions of a prompt, and report log-probs of the prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, msgspec.Meta(gt=0, le=1024)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Count | None = None
    record_stability_info: bool | None = None


class _JsonDatum(msgspec.Struct, frozen=True):
    model_input: ModelInput
    loss_fn_inputs: dict[str, JsonTensor] = {}


class _JsonInput(msgspec.Struct, frozen=True):
    data: list[_JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _JsonPass(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: Count
    forward_backward_input: _JsonInput | None = None
    forward_input: _JsonInput | None = None


def read_packed(body: bytes, kind: type[T]) -> T:
    """Read a request of a client of ours. DataError says what is wrong with it."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"the body is not a {kind.__name__}: {error}") from error


def read_json(body: bytes, kind: type[T]) -> T:
    """Read a request from JSON. DataError says what is wrong with it."""
    try:
        read = msgspec.json.decode(body, type=kind)
        if kind is not _JsonPass:  # it has no values of any type, which JSON has and no file or answer could hold
            msgspec.msgpack.encode(read)
    except (msgspec.DecodeError, OverflowError, RecursionError) as error:
        raise DataError(f"the body is not a {kind.__name__}: {error}") from error
    return read


def pass_of_json(body: bytes, most: int = SPACE) -> Pass:
    """Read a `Pass` from JSON. `most`: bytes that its sparse tensors may have once they are whole."""
    read = read_json(body, _JsonPass)
    given = read.forward_backward_input or read.forward_input
    if given is None:
        raise DataError("the body has neither forward_backward_input nor forward_input")
    space = Space(most)
    data = [
        Datum(
            np.array(each.model_input.tokens, np.int32).tobytes(),
            {name: each.loss_fn_inputs[name].packed(space) for name in sorted(each.loss_fn_inputs)},
        )
        for each in given.data
    ]
    backward = read.forward_backward_input is not None
    return Pass(read.model_id, read.seq_id, given.loss_fn, given.loss_fn_config or {}, data, backward)


def pass_of_wire(body: bytes, most: int = SPACE) -> Pass:
    """Read a `Pass` from protocol buffers. `most`: bytes that its sparse tensors may have once they are whole."""
    space, read = Space(most), wire.pass_of(body)
    config: dict[str, float | str] = dict(read.loss_fn_config)
    for name, setting in read.loss_fn_config_v2.items():
        if not (setting.HasField("number") or setting.HasField("text")):
            raise DataError(f"the setting {name!r} of the loss has no value: send a number, or leave it out")
        config[name] = setting.text if setting.HasField("text") else setting.number
    data = [_datum(each, space) for each in read.data]
    return Pass(read.model_id, _count(read.seq_id), read.loss_fn, config, data, not read.forward_only)


def number_of(body: bytes) -> tuple[str, int] | None:
    """Return the model and the number of a `Pass` of whose protocol buffer only the beginning is there. None if not."""
    head = wire.head_of(body)
    return head if head is not None and 0 <= head[1] < _MOST else None


def _datum(read: wire.Datum, space: Space) -> Datum:
    tokens = b""
    for piece in read.model_input:
        if piece.HasField("image") or piece.HasField("dmel"):
            raise DataError("a piece of the input is no text: this server reads text alone")
        tokens += piece.encoded_text.tokens
    inputs = read.loss_fn_inputs
    return Datum(tokens, {name: _tensor(inputs[name], space) for name in sorted(inputs)})


def _tensor(read: wire.Tensor, space: Space) -> Tensor:
    number, data, shape = read.dtype, read.dense, tuple(read.shape)
    if number not in _TYPES:
        raise DataError(f"a tensor has the dtype number {number!r}: send float32 or int64")
    dtype = _TYPES[number]
    kind: Literal["float32", "int64"] = "float32" if dtype == "float32" else "int64"
    if shape:
        _count(min(shape))
        _count(max(shape))
    if not data and read.HasField("sparse_csr"):  # the API has one of them
        sparse = read.sparse_csr
        rows, columns = (_values(each, "int64") for each in (sparse.crow_indices, sparse.col_indices))
        return _dense(_values(sparse.values, dtype), rows, columns, shape, space)
    if dtype == "int32":
        data = _values(data, "int32").astype(np.int64).tobytes()
    return Tensor(data, kind, shape or (len(data) // np.dtype(kind).itemsize,))


def _values(data: bytes, dtype: str) -> Array:
    """Return the numbers that bytes hold. DataError if there is a part of one."""
    if len(data) % np.dtype(dtype).itemsize:
        raise DataError(f"{len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype)


def _dense(values: Array, rows: Array, columns: Array, shape: Sequence[int], space: Space) -> Tensor:
    """Return the tensor of a matrix in compressed sparse rows. What it does not list is 0."""
    kind: Literal["float32", "int64"] = "float32" if values.dtype.kind == "f" else "int64"
    space.take(shape, kind)
    try:
        whole = np.zeros(shape, kind)
        counts = np.diff(rows)
        if counts.sum() != len(columns):
            raise ValueError(f"the rows have {counts.sum()} values, and there are {len(columns)} columns")
        row = np.repeat(np.arange(len(counts)), counts)
        whole[row, columns.astype(np.int64)] = values
    except (IndexError, MemoryError, ValueError) as error:
        raise DataError(f"a sparse tensor of shape {list(shape)} cannot be read: {error}") from error
    return Tensor(whole.tobytes(), kind, tuple(int(each) for each in shape))


def _count(value: int) -> int:
    if not 0 <= value < _MOST:
        raise DataError(f"a number of a request is {value}: send one from 0 to {_MOST - 1}")
    return value
