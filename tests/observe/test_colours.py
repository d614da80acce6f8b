"""The page's colours, told apart with every kind of colour vision, and the units, meanings and sides of its numbers."""

import re
from itertools import combinations, product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import meshrl.observe
from meshrl.events import Gauge
from meshrl.observe.metric_info import metric_info
from meshrl.observe.page import make_content
from meshrl.observe.run_files import Record

Colour: TypeAlias = npt.NDArray[np.float64]
"""Linear red, green and blue, 0 to 1."""

THEME = (Path(meshrl.observe.__file__).parent / "theme.css").read_text()
STYLES = re.findall(r"\n *:root \{(.*?)\}", THEME, re.DOTALL)  # light and dark
SIDES = {"rollout", "training", "scoring", "sync", "both", "other"}
SHADES = re.compile(r"(rollout|training|scoring|sync|wait|both|other)(-\d)?")

TEXTS, GROUNDS = ("ink", "soft", "faint"), ("ground", "card", "band")
CURVES = ("rollout", "training", "scoring", "sync", "plain")

VISIONS = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Which cones an eye has: Machado, Oliveira and Fernandes 2009, severity 1."""
_CONES = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
_OKLAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]


def palette(style: str) -> dict[str, Colour]:
    found: dict[str, Colour] = {}
    for name, digits in re.findall(r"--([\w-]+): #(\w{6});", style):
        share = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
        found[name] = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return found


def seen(colour: Colour, vision: str) -> Colour:
    """As an eye sees it, in Oklab, where 0.02 is a difference that is just seen."""
    cones: Colour = np.cbrt(np.array(_CONES) @ np.clip(np.array(VISIONS[vision]) @ colour, 0, 1))
    lab: Colour = np.array(_OKLAB) @ cones
    return lab


def contrast(one: Colour, other: Colour) -> float:
    """As WCAG 2 has it, 1 to 21."""
    darker, lighter = sorted(float(np.dot(each, (0.2126, 0.7152, 0.0722))) + 0.05 for each in (one, other))
    return lighter / darker


@pytest.mark.parametrize("style", STYLES, ids=["light", "dark"])
def test_colours_are_told_apart_and_texts_and_curves_can_be_read(style: str) -> None:
    colours = palette(style)
    shades = [name for name in colours if SHADES.fullmatch(name)]
    assert len(shades) == 17
    for vision in VISIONS:
        eye = {name: seen(colours[name], vision) for name in shades}
        apart = {pair: float(np.linalg.norm(eye[pair[0]] - eye[pair[1]])) for pair in combinations(eye, 2)}
        assert min(apart.values()) > 0.05, vision
        assert min(apart[pair] for pair in apart if SIDES.issuperset(pair)) > 0.11, vision
    texts = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in product(TEXTS, GROUNDS)}
    assert min(texts.values()) >= 4.5, texts
    curves = {name: contrast(colours[name], colours["card"]) for name in CURVES}
    assert min(curves.values()) >= 2.99, curves


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
