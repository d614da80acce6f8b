"""Writes docs/models.md: `python -m tests.models.table`. A line says what a tiny model of a type was found to do."""

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers import __version__

from meshrl import log
from meshrl.errors import ConfigError, MeshrlError
from meshrl_megatron.shape import Decoder
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.routing import routed
from tests.models.families import TOKENIZER, tiny, types

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
MARK: Final = "<!-- models -->"
_WHY: Final[Mapping[str, str]] = {
    "longer one": "not causal",
    "cannot be read": "its own kind of call",
    "see each other": "a state, a convolution or positions reach into the next row",
    "not what transformers": "its own mask or bias",
}
"""The reasons of errors by their words."""
_STYLES: Final = {"colwise", "rowwise", "replicated_with_grad_allreduce"}


def line(model_type: str) -> str:
    """Return the table's line of a type. It raises what transformers raises if there is no tiny model of it."""
    network = tiny(model_type)
    network.train(False)(input_ids=torch.tensor([[2, 3, 4, 5]]), use_cache=False)
    try:
        model = ready(network, TOKENIZER, None)
    except MeshrlError as error:
        return f"| `{model_type}` | refused |  |  |  | {_short(str(error))} |"
    layout = model.layout
    cells = [f"`{model_type}`", layout.name, _splits(model), _megatron(model), _replay(model)]
    by_rows = sorted(each.__name__ for each in model.mixers.kinds) if model.mixers and not layout.why else []
    note = _short(layout.why) if layout.why else " ".join(f"`{each}`" for each in by_rows)
    return f"| {' | '.join([*cells, note])} |"


def _short(why: str) -> str:
    return next((name for key, name in _WHY.items() if key in why), "its own attention")


def _splits(model: LanguageModel) -> str:
    plan = getattr(model.network.config.get_text_config(), "base_model_tp_plan", None)
    return "yes" if isinstance(plan, Mapping) and plan and set(plan.values()) <= _STYLES else ""


def _megatron(model: LanguageModel) -> str:
    try:
        Decoder.of(model.network.config, "logprobs")
    except MeshrlError:
        return ""
    return "yes"


def _replay(model: LanguageModel) -> str:
    try:
        routed(model)
    except ConfigError:
        return ""
    except MeshrlError as error:
        return f"no, {str(error).split()[0]}"
    return "yes"


def lines() -> dict[str, str]:
    """Return the lines of the page by type."""
    rows = PAGE.read_text("utf-8").partition(MARK)[2].splitlines()
    return {row.split("`")[1]: row for row in rows if row.startswith("| `")}


def main() -> None:
    """Write the page's table."""
    found: list[str] = []
    untried: list[str] = []
    with log.silenced():
        for each in types():
            try:
                found.append(line(each))
            except Exception as error:  # noqa: BLE001 - of transformers, for sizes that are not this type's
                untried.append(each)
                sys.stderr.write(f"{each}: {type(error).__name__}: {str(error)[:100]}\n")
            else:
                sys.stderr.write(f"{found[-1]}\n")
    head = PAGE.read_text("utf-8").partition(MARK)[0]
    table = [
        "| Type | Rows | `tp` | Megatron | Replay | Why padded or refused, or what reads rows |",
        "|---|---|---|---|---|---|",
        *found,
    ]
    names = "\n".join(textwrap.wrap(" ".join(untried), 120, break_on_hyphens=False))
    what = f"Types of transformers {__version__} without a tiny model here, which the same proof decides"
    rest = f"{what}:\n\n```text\n{names}\n```"
    PAGE.write_text("\n".join([f"{head}{MARK}", *table, "", rest, ""]), "utf-8")


if __name__ == "__main__":
    main()
