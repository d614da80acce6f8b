"""The API's protocol buffers: the messages that this server reads and writes, with the fields that it knows.

A field that is unknown, or of another type, is as if it had not been sent: so google.protobuf reads them.
https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias, cast

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.errors import DataError

_MESSAGES: Final = {
    "Text": "1 bytes tokens",
    "Chunk": "1 Text encoded_text, 2 Text image, 3 Text dmel",
    "Sparse": "1 bytes values, 2 bytes crow_indices, 3 bytes col_indices",
    "Tensor": "1 ?bytes dense, 2 Sparse sparse_csr, 3 int32 dtype, 4 *int64 shape",
    "Datum": "1 *Chunk model_input, 2 :Tensor loss_fn_inputs",
    "Setting": "1 ?double number, 2 ?string text",
    "Head": "1 string model_id, 2 ?int64 seq_id",
    "Pass": "1 string model_id, 2 int64 seq_id, 3 *Datum data, 4 string loss_fn, 5 :double loss_fn_config, "
    "6 bool forward_only, 7 :Setting loss_fn_config_v2",
    "Rows": "1 bytes data, 2 bytes offsets, 3 int32 dtype",
    "Record": "1 string type_tag, 2 :Rows fields, 3 int64 num_datums",
    "Passed": "1 string loss_fn_output_type, 2 *Record loss_fn_outputs, 3 :double metrics",
    "TopK": "1 bytes token_ids, 2 bytes logprobs, 3 int64 k, 4 int64 length",
    "Drawn": "1 int32 stop_reason, 2 bytes tokens, 3 ?bytes logprobs, 4 TopK topk_sampled_logprobs",
    "Sampled": "1 *Drawn sequences, 2 ?bytes prompt_logprobs, 3 TopK topk_prompt_logprobs, "
    "5 Tensor target_prompt_logprobs",
}
"""For each message its fields: number, type, and name. A star: any number of them. A colon: a map from texts. A
question mark: whether the field was given can be asked."""
_PACKAGE: Final = "meshrl.tinker"
_HEAD: Final = 512
"""Bytes in which a body names its model and its number, which the SDK writes first."""


class Sent(Protocol):
    """A message that says which fields were sent."""

    def HasField(self, name: str) -> bool:  # noqa: N802 -- as the library names it
        """True if a field was sent."""
        ...


class Sparse(Protocol):
    """A matrix in compressed sparse rows: float32 values, and int64 indices."""

    values: bytes
    crow_indices: bytes
    col_indices: bytes


class Tensor(Sent, Protocol):
    """An array, dense or sparse."""

    dense: bytes
    sparse_csr: Sparse
    dtype: int
    shape: Sequence[int]


class Text(Protocol):
    """Tokens, int32."""

    tokens: bytes


class Chunk(Sent, Protocol):
    """A piece of a row's input."""

    encoded_text: Text


class Datum(Protocol):
    """A row."""

    model_input: Sequence[Chunk]
    loss_fn_inputs: Mapping[str, Tensor]


class Setting(Sent, Protocol):
    """A setting of a loss: a number, or a text."""

    number: float
    text: str


class Head(Sent, Protocol):
    """The beginning of a request."""

    model_id: str
    seq_id: int


class Pass(Protocol):
    """A request to run the model over rows."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float]
    forward_only: bool
    loss_fn_config_v2: Mapping[str, Setting]


Value: TypeAlias = int | float | str | bytes | Message | Sequence[Message] | Sequence[int] | Mapping[str, object]


def pass_of(body: bytes) -> Pass:
    """Read a pass. DataError if it is none."""
    try:
        return cast("Pass", _classes["Pass"].FromString(body))
    except DecodeError as error:
        raise DataError(f"the body is not a whole protocol buffer of a pass: {error}") from error


def head_of(body: bytes) -> tuple[str, int] | None:
    """Return the model and the number of a pass from its beginning. None if they are not there."""
    for end in range(min(len(body), _HEAD), 0, -1):
        try:
            head = cast("Head", _classes["Head"].FromString(body[:end]))
        except DecodeError:  # it ends within a field
            continue
        return (head.model_id, head.seq_id) if head.model_id and head.HasField("seq_id") else None
    return None


def message(kind: str, **values: Value | None) -> Message:
    """Make a message. None leaves a field out."""
    return _classes[kind](**{name: value for name, value in values.items() if value is not None})


def _described() -> FileDescriptorProto:
    file = FileDescriptorProto(name="meshrl_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, kind, label = field.split(" ")
            if kind.startswith(":"):
                entry = "".join(map(str.capitalize, label.split("_"))) + "Entry"
                pair = made.nested_type.add(name=entry, options={"map_entry": True})
                _add(pair, 1, "string", "key")
                _add(pair, 2, kind[1:], "value")
                kind = f"*{name}.{entry}"
            _add(made, int(number), kind, label)
    return file


def _add(made: DescriptorProto, number: int, kind: str, name: str) -> None:
    bare = kind.lstrip("*?")
    field = made.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if kind.startswith("*") else Field.LABEL_OPTIONAL
    if kind.startswith("?"):
        field.proto3_optional, field.oneof_index = True, len(made.oneof_decl)
        made.oneof_decl.add(name=f"_{name}")
    if bare[0].isupper():
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{bare}"
    else:
        field.type = Field.Type.Value(f"TYPE_{bare.upper()}")


_pool: Final = DescriptorPool()
_pool.Add(_described())
_classes: Final[Mapping[str, type[Message]]] = {
    name: GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
}
