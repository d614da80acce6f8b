"""What the numbers of a run are: their units, and the sides whose colours they have."""

from pathlib import Path
from typing import get_args

import meshrl.report
from meshrl.events import Gauge
from meshrl.report.content import make_content
from meshrl.report.quantities import Hue, quantity
from meshrl.report.reading import Record

UNITS = {
    "reward": ("mean over completions", "scoring"),
    "reward/format": ("mean over completions", "scoring"),
    "eval/pass@4": ("share of held-out prompts", "scoring"),
    "completion_tokens": ("tokens, mean over completions", "rollout"),
    "entropy": ("nats, mean over tokens", "training"),
    "reference_kl": ("nats, mean over tokens", "training"),
    "critic_value_clip_fraction": ("share of tokens", "training"),
    "critic_rows": ("in an update", "training"),
    "loss": ("", "training"),
    "staleness": ("publications behind, mean over rows", "sync"),
    "step_s": ("seconds", "plain"),
    "groups ready": ("groups", "rollout"),
    "my_own": ("", "plain"),
}


def test_units_and_sides() -> None:
    assert {name: quantity(name)[:2] for name in UNITS} == UNITS


def test_curves_gauges_and_headlines_have_units() -> None:
    summary: dict[str, object] = {"steps": 1, "exact_match_before": 0.25, "exact_match_after": 0.5, "seconds_saved": 3}
    metrics: list[dict[str, object]] = [{"step": 0, "reward": 0.5, "my_own": 1}]
    content = make_content(Record(Path("mine"), summary, metrics, events=[Gauge("groups ready", 1, 4)]))
    assert [(curve.unit, curve.hue) for curve in content.curves] == [
        ("mean over completions", "scoring"),
        ("", "plain"),
    ]
    assert [(gauge.unit, gauge.hue) for gauge in content.gauges] == [("groups", "rollout")]
    assert content.units["exact_match"] == "share of held-out prompts"
    assert content.units["reward"] == "mean over completions"
    assert content.units["seconds_saved"] == ""


def test_each_side_has_its_colour() -> None:
    style = (Path(meshrl.report.__file__).parent / "theme.css").read_text("utf-8")
    assert all(style.count(f"--{hue}: #") == 2 for hue in get_args(Hue))
