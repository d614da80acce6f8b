"""The script for the first real GPU, on fake ones: its limits, its file, and that a second call goes on."""

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.first import Gpus, parts


def test_parts_fit_into_a_quarter_of_an_hour_and_are_resumed(tmp_path: Path) -> None:
    assert sum(part.seconds for part in parts().values()) <= 900
    file = tmp_path / "runs" / "first-gpu-fake.json"
    file.parent.mkdir()
    file.write_text(json.dumps({name: {"outcome": "passed"} for name in parts() if name != "engine killed"}))
    command = [sys.executable, "-m", "tests.gpu.first"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "engine killed: left out: there is no .venv-vllm/bin/python on fake GPUs\n"
    written = json.loads(file.read_text())
    assert written["gpus"] == ["Fake GPU", "Fake GPU"]
    assert written["engine killed"]["not_shown"] == "what a driver does after a kill: these GPUs are fake"
    assert written["update"] == {"outcome": "passed"}


def test_a_part_is_kept_with_all_that_it_printed(tmp_path: Path) -> None:
    devices = parts()["devices"].run(Gpus())
    assert devices["outcome"] == "passed"
    assert devices["printed"].count("name='Fake GPU'") == 2
    trained = parts()["fsdp"]._replace(command=[*parts()["fsdp"].command, f"run.folder={tmp_path}"]).run(Gpus())
    assert trained["outcome"] == "passed", trained["printed"]
