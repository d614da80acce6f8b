"""Dates, metadata and checkpoints as the answers list them in JSON."""

from collections.abc import Mapping
from datetime import UTC, datetime

from meshrl.tinker.library import Checkpoint


def date(seconds: float) -> str:
    """Return a date in UTC from Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Return metadata whose values are texts."""
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def checkpoint(each: Checkpoint) -> dict[str, object]:
    """Return the entry of a checkpoint in a list."""
    return {
        "checkpoint_id": each.name,
        "checkpoint_type": each.kind,
        "time": date(each.time),
        "tinker_path": each.path,
        "size_bytes": each.size_bytes,
        "public": each.public,
        "user_metadata": each.user_metadata,
        "expires_at": None if each.expires is None else date(each.expires),
    }
