"""Log lines whose reader is gone."""

import os
import sys
from contextlib import suppress

import pytest

from meshrl import log


def test_a_closed_pipe_does_not_end_who_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    stderr = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(BrokenPipeError):
        print("nobody reads it", file=stderr)
    log.info("one")
    log.warning("two")
    with suppress(BrokenPipeError):
        stderr.close()
