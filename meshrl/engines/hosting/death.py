"""How a rank's process ended, and its last output."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Death:
    """How a process ended."""

    pid: int
    host: str
    reason: str
    written: str = ""
    """The last lines of its output."""

    @property
    def told(self) -> str:
        """Describe why it ended, with its last output."""
        return f"{self.reason}\n{self.written}" if self.written else self.reason
