"""`meshrl memory` and the ledger of fake GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fake_gpu.ledger import SETTINGS


def test_what_is_told_is_within_a_tenth_of_what_a_gpu_gives(tmp_path: Path) -> None:
    own = {"FAKE_CUDA": "memory", "FAKE_LEDGER": str(tmp_path / "ledger")}
    command = [sys.executable, "-m", "tests.fake_gpu.ledger", "--json"]
    printed = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = json.loads(printed)
    assert found.keys() == SETTINGS.keys()
    apart = {name: (told, taken) for name, (told, taken) in found.items() if abs(told - taken) > 0.1 * taken}
    assert not apart
