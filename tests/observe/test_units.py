"""What the numbers of a run are: their units and meanings, and the sides whose colours they have."""

from pathlib import Path

from meshrl.events import Gauge
from meshrl.observe.metric_info import METRICS, metric_info
from meshrl.observe.page import make_content
from meshrl.observe.run_files import Record

UNITS = {
    "reward/format": ("mean over completions", "scoring"),
    "eval/pass@4": ("share of held-out prompts", "scoring"),
    "entropy": ("nats, mean over tokens", "training"),
    "reference_kl": ("nats, mean over tokens", "training"),
    "critic_value_clip_fraction": ("share of tokens", "training"),
    "critic_rows": ("in an update", "training"),
    "staleness": ("publications behind, mean over rows", "sync"),
    "groups ready": ("groups", "rollout"),
    "my_own": ("", "plain"),
}


def test_units_and_sides_of_names_curves_gauges_and_headlines() -> None:
    assert {name: metric_info(name)[:2] for name in UNITS} == UNITS
    summary: dict[str, object] = {"steps": 1, "exact_match_before": 0.25, "exact_match_after": 0.5, "seconds_saved": 3}
    metrics: list[dict[str, object]] = [{"step": 0, "reward": 0.5, "my_own": 1}]
    content = make_content(Record(Path("mine"), summary, metrics, events=[Gauge("groups ready", 1, 4)]))
    drawn = {each.name: (each.unit, each.hue) for each in (*content.curves, *content.gauges)}
    known = {name: UNITS[name] for name in ("my_own", "groups ready")}
    assert drawn == known | {"reward": ("mean over completions", "scoring")}
    assert content.units["exact_match"] == "share of held-out prompts"
    assert content.units["reward"] == "mean over completions"
    assert content.units["seconds_saved"] == ""


def test_each_known_number_has_a_meaning_and_is_found_by_its_name() -> None:
    hidden = [name for name, known in METRICS.items() if metric_info(name) is not known or known.meaning[-1] != "."]
    assert hidden == []
