"""The backends that sample, against the suite that each of them must pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl import Sampling, Weights
from meshrl.testing import conformance
from meshrl.testing.conformance import Check, Harness, Subject, Trial, draws, interruptions, rows
from meshrl.testing.conformance.samples import completions, drawn, questions
from tests.conformance.kits import asked, keep

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def greedy_of_transformers(trial: Trial) -> None:
    """Greedy completions are what transformers generates, with tied embeddings and without."""
    for tied in (True, False):
        pair = await trial.pair(tied)
        sampler = await trial.own.sampler(model=pair.old)
        rollouts = await drawn(sampler, questions(5), Sampling(max_tokens=12, temperature=0))
        network: Any = AutoModelForCausalLM.from_pretrained(pair.old, attn_implementation="eager")
        assert network.config.tie_word_embeddings is tied
        for tokens, completion in zip(rollouts.tokens, completions(rollouts), strict=True):
            prompt = torch.from_numpy(tokens[: len(tokens) - len(completion)].astype(np.int64))[None]
            expected = network.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
            assert tokens.tolist() == expected[0].tolist()


ON_TWO_RANKS = (
    draws.seeds, rows.columns, rows.few_rows, interruptions.a_cancelled_call, interruptions.an_abort,
    interruptions.numbers_around_a_load,
)  # fmt: skip
"""What hangs on which rank has a row."""
SKILL = Weights(0, {"skill": np.array([0.5])})
CASES = [
    *asked(Subject("fake", {"dp": 2}, weights=SKILL), conformance.SAMPLER_OF_NO_MODEL),
    *asked(Subject("torch"), [*conformance.SAMPLER, greedy_of_transformers]),
    *asked(Subject("torch", {"dp": 2}), ON_TWO_RANKS, (*conformance.SAMPLER_OF_NO_MODEL, draws.greedy)),
]


@pytest.mark.parametrize(("harness", "model", "checks"), CASES, indirect=["harness"])
async def test_a_sampler_conforms(harness: Harness, model: str, checks: Sequence[Check]) -> None:
    await keep(harness, checks)
