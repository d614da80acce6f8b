"""Mistakes in what `meshrl serve` is asked for."""

import sys
from pathlib import Path

from meshrl.cli import app

CONFIG = '[policy]\nmodel = { characters = "act>" }\n'


def _serve(*options: str) -> None:
    app(args=["serve", "mine", *options], standalone_mode=False)


def _make_run() -> Path:
    run = Path("runs/mine")
    run.mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    (run / "metrics.jsonl").touch()
    return run


def nothing_to_serve() -> None:
    _make_run()
    _serve()


def adapters_without_their_file() -> None:
    model = _make_run() / "model"
    model.mkdir()
    (model / "adapter_config.json").write_text("{}")
    _serve()


def following_for_others() -> None:
    model = _make_run() / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    _serve("--follow", "--host", "0.0.0.0", "--python", sys.executable)  # noqa: S104 -- what is refused
