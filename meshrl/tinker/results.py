"""What a request resulted in, and how a client receives it: as JSON, or as protocol buffers."""

from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
from google.protobuf.message import Message

from meshrl.remote import MSGPACK, Made
from meshrl.tinker.wire import message

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_FLOAT32: Final = 1
"""The number of a dtype in the wire format."""
_LENGTH: Final = 1
"""The number of a stop reason in the wire format."""


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    """A result that is JSON."""

    body: dict[str, object]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Why there is no result, and whether the request or the server is to blame."""

    error: str
    category: Literal["user", "server"]


class Passed(msgspec.Struct, frozen=True, tag="pass"):
    """What the model computed for each row."""

    lengths: list[int]
    """Tokens of each row."""
    logprobs: bytes
    """float32[tokens of all rows]."""
    metrics: dict[str, float]


class TopK(msgspec.Struct, frozen=True):
    """The most probable tokens at each place."""

    ids: bytes
    """int32[places, k]."""
    logprobs: bytes
    """float32[places, k]. -99999 where there is none."""
    k: int

    @property
    def places(self) -> int:
        """The number of places."""
        return len(self.ids) // (4 * self.k)

    def wire(self) -> Message:
        """Return the protocol buffer."""
        return message("TopK", token_ids=self.ids, logprobs=self.logprobs, k=self.k, length=self.places)

    def rows(self) -> list[list[tuple[int, float]] | None]:
        """Return pairs of token and log-prob for each place, None where there is none."""
        ids = np.frombuffer(self.ids, np.int32).reshape(-1, self.k).tolist()
        logprobs = np.frombuffer(self.logprobs, np.float32).reshape(-1, self.k).tolist()
        pairs = [list(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]
        return [None if row[0] == (0, -99999.0) else row for row in pairs]


class Drawn(msgspec.Struct, frozen=True):
    """One completion."""

    tokens: bytes
    """int32[tokens]."""
    logprobs: bytes
    """float32[tokens]."""
    stopped: bool
    """False if `max_tokens` or the model's length cut it off."""
    topk: TopK | None = None


class Sampled(msgspec.Struct, frozen=True, tag="sample"):
    """The completions of a prompt."""

    sequences: list[Drawn]
    prompt_logprobs: bytes | None = None
    """float32[prompt tokens], NaN where there is none."""
    topk_prompt: TopK | None = None
    targets: bytes | None = None
    """float32[prompt tokens - 1, columns]."""
    columns: int = 0


Result: TypeAlias = Plain | Failure | Passed | Sampled | Made


def nbytes_of(result: Result) -> int:
    """Return about how many bytes a result takes."""
    if isinstance(result, Made):
        return sum(map(len, result.batch.parts)) if result.batch else 0
    return len(msgspec.msgpack.encode(result))


def reply(result: Result, *, binary: bool) -> tuple[bytes, str]:
    """Return the body and the content type of a result. `binary`: whether the client accepts protocol buffers."""
    if isinstance(result, Failure):
        return msgspec.json.encode({"error": result.error, "category": result.category}), JSON
    if isinstance(result, Plain):
        return msgspec.json.encode(result.body), JSON
    if isinstance(result, Made):
        return msgspec.msgpack.encode(result), MSGPACK
    if not binary:
        return msgspec.json.encode(_json_of(result)), JSON
    made = _pass_wire(result) if isinstance(result, Passed) else _sample_wire(result)
    return bytes(made.SerializeToString()), PROTOBUF


def _pass_wire(result: Passed) -> Message:
    ends = np.cumsum([0, *result.lengths], dtype=np.int64) * 4
    rows = message("Rows", data=result.logprobs, offsets=ends.tobytes(), dtype=_FLOAT32)
    record = message("Record", type_tag="ArrayRecord", fields={"logprobs": rows}, num_datums=len(result.lengths))
    return message("Passed", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=result.metrics)


def _sample_wire(result: Sampled) -> Message:
    drawn = [
        message(
            "Drawn",
            stop_reason=None if each.stopped else _LENGTH,
            tokens=each.tokens,
            logprobs=each.logprobs,
            topk_sampled_logprobs=each.topk and each.topk.wire(),
        )
        for each in result.sequences
    ]
    targets: Message | None = None
    if result.targets is not None:
        shape = (len(result.targets) // (4 * result.columns), result.columns)
        targets = message("Tensor", dense=result.targets, dtype=_FLOAT32, shape=shape)
    return message(
        "Sampled",
        sequences=drawn,
        prompt_logprobs=result.prompt_logprobs,
        topk_prompt_logprobs=result.topk_prompt and result.topk_prompt.wire(),
        target_prompt_logprobs=targets,
    )


def _json_of(result: Passed | Sampled) -> dict[str, object]:
    if isinstance(result, Passed):
        rows = np.split(np.frombuffer(result.logprobs, np.float32), np.cumsum(result.lengths)[:-1])
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {"logprobs": {"data": row.tolist(), "dtype": "float32", "shape": [len(row)]}} for row in rows
            ],
            "metrics": result.metrics,
        }
    prompt = result.prompt_logprobs
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if each.stopped else "length",
                "tokens": np.frombuffer(each.tokens, np.int32).tolist(),
                "logprobs": np.frombuffer(each.logprobs, np.float32).tolist(),
                "topk_logprobs": each.topk.rows() if each.topk else None,
            }
            for each in result.sequences
        ],
        "prompt_logprobs": None if prompt is None else _with_none(prompt),
        "topk_prompt_logprobs": result.topk_prompt.rows() if result.topk_prompt else None,
    }


def _with_none(values: bytes) -> list[float | None]:
    return [None if value != value else value for value in np.frombuffer(values, np.float32).tolist()]  # noqa: PLR0124
