"""Checkpoints of fake and simulated roles: one JSON file."""

from pathlib import Path

import msgspec

from meshrl.errors import DataError


class State(msgspec.Struct, frozen=True):
    """The whole state of a role without a model."""

    role: str
    updates: int
    """Number of updates."""
    skill: float | None = None
    """Of a fake policy."""

    def write(self, folder: str) -> None:
        """Write `state.json`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "state.json").write_bytes(msgspec.json.encode(self))


def read_state(folder: str, role: str) -> State:
    """Read a state. Raises DataError if it belongs to another role."""
    state = msgspec.json.decode(Path(folder, "state.json").read_bytes(), type=State)
    if state.role != role:
        raise DataError(
            f"{folder} holds the state of a {state.role}, not of a {role}: restore each role from its own folder"
        )
    return state
