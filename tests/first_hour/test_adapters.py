import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.first_hour.terminal import done, refused

BASE = """
algorithm = "sft"
rows = 16
steps = 2
run.name = "base"
task = { source = "meshrl:spell_backward", options.size = 200, prompt = "{word}>", held_out = 4 }
sampling.max_tokens = 10
policy.model.characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ>"
"""
ADAPTED = ("run.name=mine", "policy.model=runs/base/model", "policy.lora={rank = 4, alpha = 8}", "steps=4")


def read(folder: Path | str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[3, 9, 27, 5, 41]])).logits
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters_are_merged_judged_and_trained_on_from_and_say_what_they_lack(tmp_path: Path) -> None:
    Path("mine.toml").write_text(BASE, "utf-8")
    done("run", "mine.toml")
    done("run", "mine.toml", *ADAPTED, "policy.optimizer.lr=0.1", "run.checkpoint_every=2")
    run, whole = tmp_path / "runs" / "mine", tmp_path / "runs" / "base" / "model"
    assert not (run / "model" / "config.json").exists()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`is_gradient_checkpointing`", FutureWarning)
        assert done("merge", "mine").out == f"wrote {run / 'merged'}, from {run / 'model'}\n"
    wanted = logits(PeftModel.from_pretrained(read(whole), str(run / "model")))
    torch.testing.assert_close(logits(read(run / "merged")), wanted)
    assert (wanted - logits(read(whole))).abs().max() > 0.1
    assert refused("merge", "mine").endswith("exists already: choose another place with --out, or remove it")

    done("eval", "mine", "--n", "2")
    judged, trained = (json.loads((run / name).read_text("utf-8")) for name in ("eval.json", "summary.json"))
    assert (judged["model"], judged["greedy"]["value"]) == ("model", trained["exact_match_after"])

    (run / "model").rename(run / "kept")  # as in a run that goes on: there are checkpoints alone
    assert done("merge", "mine", "--out", "whole").out.endswith(f"{run / 'checkpoints' / 'step-000004'}\n")
    torch.testing.assert_close(logits(read("whole")), wanted)

    done("run", "mine.toml", "run.name=next", "policy.model=runs/mine/kept", "steps=1")
    assert Path("runs/next/model/config.json").is_file()

    assert refused("merge", "base") == f"error: {whole.parent} has trained no adapters: its model is in {whole}"
    (run / "kept").rename(run / "model")
    moved = run.rename(run.parent / "moved")
    whole.rename(run.parent / "elsewhere")
    told = refused("merge", "moved", "--out", "again")
    assert f"{moved / 'model'} holds adapters, whose model cannot be read: model '{whole}'" in told
