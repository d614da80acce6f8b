"""The reference of metrics: what each number of a run means, and its unit, as the report knows them."""

from meshrl.observe.metric_info import Hue, metrics

PAGE = "reference/metrics.md"
_SIDES: dict[Hue, str] = {
    "plain": "The step",
    "scoring": "Rewards and evaluation",
    "rollout": "Rollouts",
    "training": "Updates",
    "sync": "Versions and weights",
}


def pages() -> dict[str, str]:
    """The text of the page, by its path in the site."""
    parts = [
        """# Metrics

Look up what a number means, in `metrics.jsonl`, `evaluations.jsonl`, `summary.json`, a tracker or the report. `*` is
any text. In a summary, `_before` and `_after` follow the name of what was measured around the run. Numbers that
your own script records have the names you give them.
"""
    ]
    for hue, title in _SIDES.items():
        rows = [
            f"| `{name}` | {known.unit} | {known.meaning} |" for name, known in metrics().items() if known.hue == hue
        ]
        parts.append(f"\n## {title}\n\n| Name | Unit | What it means |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return {PAGE: "".join(parts)}
