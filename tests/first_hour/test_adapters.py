"""Adapters after a run: judged, merged into their model, and trained on from, as any other model."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.first_hour.terminal import Terminal

BASE = """
algorithm = "sft"
rows = 16
steps = 2
run.name = "base"
task = { source = "meshrl:spell_backward", options.size = 200, prompt = "{word}>", held_out = 4 }
sampling.max_tokens = 10
[policy.model]
characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>"
hidden_size = 16
ffn_size = 24
layers = 2
heads = 2
max_tokens = 32
"""
ADAPTED = ("run.name=mine", "policy.model=runs/base/model", "policy.lora={rank = 4, alpha = 8}", "steps=4")


@pytest.fixture
def run(tmp_path: Path, terminal: Terminal) -> Path:
    """The folder of a run that has trained adapters of a model of one's own."""
    (tmp_path / "mine.toml").write_text(BASE, "utf-8")
    assert terminal("run", "mine.toml")[0] == 0
    status, _, err = terminal("run", "mine.toml", *ADAPTED, "policy.optimizer.lr=0.1", "run.checkpoint_every=2")
    assert status == 0, err
    return tmp_path / "runs" / "mine"


def read(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[3, 9, 27, 5, 41]])).logits
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters_are_merged_judged_and_trained_on_from_and_say_what_they_lack(run: Path, terminal: Terminal) -> None:
    assert not (run / "model" / "config.json").exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`is_gradient_checkpointing`", FutureWarning)
        status, out, err = terminal("merge", "mine")
    assert (status, out) == (0, f"wrote {run / 'merged'}, from {run / 'model'}\n"), err
    base = run.parent / "base" / "model"
    wanted = logits(PeftModel.from_pretrained(read(base), str(run / "model")))
    torch.testing.assert_close(logits(read(run / "merged")), wanted)
    assert (wanted - logits(read(base))).abs().max() > 0.1
    assert terminal("merge", "mine")[2].endswith("exists already: choose another place with --out, or remove it\n")

    assert terminal("eval", "mine", "--n", "2")[0] == 0
    judged = json.loads((run / "eval.json").read_text("utf-8"))
    assert judged["model"] == "model"
    trained = json.loads((run / "summary.json").read_text("utf-8"))
    assert judged["greedy"]["value"] == trained["exact_match_after"]

    (run / "model").rename(run / "kept")  # as in a run that goes on: there are checkpoints alone
    status, out, err = terminal("merge", "mine", "--out", "whole")
    assert status == 0, err
    assert out.endswith(f"{run / 'checkpoints' / 'step-000004'}\n")
    torch.testing.assert_close(logits(read(Path("whole"))), wanted)

    status, _, err = terminal("run", "mine.toml", "run.name=next", "policy.model=runs/mine/kept", "steps=1")
    assert status == 0, err
    assert (run.parent / "next" / "model" / "config.json").is_file()

    whole = run.parent / "base" / "model"
    status, _, err = terminal("merge", "base")
    assert status == 1
    assert err == f"error: {run.parent / 'base'} has trained no adapters: its whole model is in {whole}\n"
    (run / "kept").rename(run / "model")
    moved = run.rename(run.parent / "moved")
    whole.rename(run.parent / "elsewhere")
    status, _, err = terminal("merge", "moved", "--out", "again")
    assert status == 1
    assert f"{moved / 'model'} holds adapters, whose model cannot be read: model '{whole}'" in err
