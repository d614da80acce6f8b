"""Answers that vLLM holds to a schema and to a required call: their form, their log-probs, and who may learn them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshrl import Batch, ClippedLoss, PolicyConfig, Sampling, rollout
from meshrl.agents.protocol import Asked
from meshrl.data import UNREPEATED, Branch, Constraint, masked_spans
from meshrl.errors import DataError
from meshrl.mesh import Rank, rank_context
from meshrl_torch.model.chat import read_chat
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.sampler import VllmSampler
from tests.agents.test_constraints import SCHEMA, TEMPLATE, TOOLS
from tests.inference.conftest import Backend
from tests.inference.networks import SHAPE
from tests.real_rows.shapes import Shape

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EACH = 4


def made(folder: Path) -> str:
    """A model whose tokens are pieces of bytes, which vLLM's grammars can read."""
    tokenizer = Shape("bytes", "bytes", TEMPLATE, "</s>").tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    own: Any = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(**own)).save_pretrained(folder)
    return str(folder)


async def test_answers_are_held_to_a_form_under_a_mask_that_no_policy_repeats(tmp_path: Path) -> None:
    model = made(tmp_path)
    rank_context.set(Rank(threads=1))
    config = Backend("vllm").config(model=model, slots=8)
    call = Asked([], None, TOOLS, called=["mul"]).constraint(read_chat(config), "")
    assert call is not None
    texts = [Constraint((Branch(SCHEMA),)).text, call.text, None]
    sampler = VllmSampler(config)
    prompts = Batch.of(prompt=["Say: "] * 3, constraint=texts)
    rows = await (await rollout(sampler, prompts, Sampling(n=EACH, max_tokens=150, temperature=0.7))).load()
    sampler.close()
    said = [str(text) for text in rows.objects("completion")]
    whole = np.flatnonzero(~np.asarray(rows.row("truncated"), np.bool_)[: 2 * EACH]).tolist()
    assert {row // EACH for row in whole} == {0, 1}
    begin, end = '<tool_call>\n{"name": "mul", "arguments": ', "}\n</tool_call>|"  # the template's end of a turn, too
    for row in whole:
        is_call = row >= EACH
        assert not is_call or (said[row].startswith(begin) and said[row].endswith(end)), said[row]
        read = json.loads(said[row][len(begin) : -len(end)] if is_call else said[row])
        assert read.keys() == {"a", "b"}
        assert 0 <= read["a"] <= 99
        assert read["b"] in ("x", "y")
    spans = masked_spans(rows)
    assert [[mask for *_, mask in own] for own in spans] == [[UNREPEATED]] * 2 * EACH + [[]] * EACH
    policy = TorchPolicy(PolicyConfig(model=model))
    for learns in (policy.logprobs(rows), policy.update(rows.assign(advantages=np.ones(len(rows))), ClippedLoss())):
        with pytest.raises(DataError, match="by an engine under a mask of its own"):
            await learns
    # A mask raises what it leaves. A token that it forces is certain.
    free = (await policy.logprobs(rows.assign(masked=[None] * len(rows)))).ragged("logprobs")
    for row in range(len(rows)):
        learned = np.asarray(rows.loss_mask[row], np.bool_)
        raised = np.asarray(rows.sampler_logprobs[row], float)[learned] - np.asarray(free[row], float)[learned]
        assert raised.min() > -1e-4
        assert raised.max() > 1 if row < 2 * EACH else raised.max() < 1e-4
