"""Small requests, about sessions, samplers and checkpoints, as JSON has them."""

import msgspec

from meshrl.tinker.requests import Count


class NewSession(msgspec.Struct, frozen=True):
    """Open a session."""

    tags: list[str] = []
    user_metadata: dict[str, object] | None = None
    project_id: str | None = None
    display_name: str | None = None


class OfSession(msgspec.Struct, frozen=True):
    """Name a session."""

    session_id: str


class Finish(msgspec.Struct, frozen=True):
    """End a session."""

    reason: dict[str, object] = {}


class Search(msgspec.Struct, frozen=True):
    """Look for sessions."""

    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = {}
    limit: int = 50


class NewSampler(msgspec.Struct, frozen=True):
    """Open a sampling session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(msgspec.Struct, frozen=True):
    """Name a sampling session."""

    sampling_session_id: str


class OfModel(msgspec.Struct, frozen=True):
    """Name a model."""

    model_id: str


class Number(msgspec.Struct, frozen=True):
    """The number of a request of a model. Nothing else of it can be read."""

    model_id: str
    seq_id: Count


class Retrieve(msgspec.Struct, frozen=True):
    """Ask for the result of a request, or cancel it."""

    request_id: str
    allow_metadata_only: bool = False


class AtPath(msgspec.Struct, frozen=True):
    """Name a checkpoint."""

    tinker_path: str


class Ttl(msgspec.Struct, frozen=True):
    """Let a checkpoint expire."""

    ttl_seconds: int | None = None
