"""The script for the first real GPU, on fake ones: its limits, its file, and that a second call goes on."""

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.first import parts


def test_parts_fit_into_a_quarter_of_an_hour_and_are_resumed(tmp_path: Path) -> None:
    assert sum(part.seconds for part in parts().values()) <= 900
    file = tmp_path / "runs" / "first-gpu-fake.json"
    file.parent.mkdir()
    others = {name: {"outcome": "passed"} for name in parts() if name not in ("devices", "engine killed")}
    file.write_text(json.dumps(others))
    command = [sys.executable, "-m", "tests.gpu.first"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    missing = "engine killed: left out: there is no .venv-vllm/bin/python on fake GPUs"
    assert ran.stdout.splitlines() == ["devices: passed on fake GPUs", missing]
    written = json.loads(file.read_text())
    assert written["gpus"] == ["Fake GPU", "Fake GPU"]
    assert "Fake GPU" in written["devices"]["printed"]
    assert written["devices"]["not_shown"] == "the driver: these GPUs are fake"
    assert written["update"] == {"outcome": "passed"}
