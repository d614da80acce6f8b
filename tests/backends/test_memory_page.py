"""The table of docs/gpu.md says what is told, and its formulas come near it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from meshrl_inference.memory import parameters_of

ROOT = Path(__file__).parents[2]
PRINT = """
import json, runpy, sys
page = runpy.run_path("docs/memory.py")
told = [page["told"](*asked) for asked in page["ASKED"]]
json.dump([page["written"](), page["ASKED"], told], sys.stdout)
"""


@pytest.mark.wide
@pytest.mark.slow
def test_the_page_says_what_is_told_and_each_formula_comes_within_a_tenth() -> None:
    """By a process that is in no process group."""
    answer = subprocess.run([sys.executable, "-c", PRINT], cwd=ROOT, capture_output=True, check=True)
    page, asked, told = json.loads(answer.stdout)
    assert page == (ROOT / "docs/gpu.md").read_text("utf-8"), "run python docs/memory.py"
    for (model, ranks), terms in zip(asked, told, strict=True):
        shape = AutoConfig.from_pretrained(ROOT / "tests/data/models" / model)
        own, hidden, layers = parameters_of(shape) / ranks, shape.hidden_size, shape.num_hidden_layers
        ends = 2 * shape.vocab_size * hidden + hidden
        a_layer = (own * ranks - ends) / layers
        assert terms["parameters"] == pytest.approx(4 * own, rel=0.01)
        assert terms["moments"] == pytest.approx(8 * own, rel=0.01)
        assert terms["gradients"] == pytest.approx(4 * own, rel=0.01)
        assert terms["gathered"] == 2 * ends
        assert terms["activations"] == pytest.approx(2 * hidden * 16384 * layers + 2 * a_layer, rel=0.1)
