"""The backends that sample, against the suite that each of them must pass."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl import Sampling, Weights
from meshrl.testing.conformance import (
    SAMPLER,
    SAMPLER_OF_NO_MODEL,
    Check,
    Harness,
    Subject,
    Trial,
    draws,
    interruptions,
    name_of,
    rows,
)
from meshrl.testing.conformance.samples import completions, drawn, questions

pytestmark = pytest.mark.asyncio(loop_scope="session")

SKILL = Weights(0, {"skill": np.array([0.5])})
ON_TWO_RANKS = (*rows.ANY, *interruptions.ANY, draws.greedy, interruptions.numbers_around_a_load)
SUBJECTS = [
    (Subject("fake", weights=SKILL), SAMPLER_OF_NO_MODEL),
    (Subject("fake", {"dp": 2}, weights=SKILL), SAMPLER_OF_NO_MODEL),
    (Subject("torch"), SAMPLER),
    (Subject("torch", {"dp": 2}), ON_TWO_RANKS),
]


CASES = [
    pytest.param(subject, check, id=f"{subject}-{name_of(check)}") for subject, checks in SUBJECTS for check in checks
]


@pytest.mark.parametrize(("harness", "check"), CASES, indirect=["harness"])
async def test_a_sampler_conforms(harness: Harness, check: Check) -> None:
    await harness.run(check)


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


@pytest.mark.parametrize("harness", [SUBJECTS[2][0]], indirect=True, ids=str)
async def test_greedy_completions_are_those_of_transformers(harness: Harness) -> None:
    await harness.run(greedy_of_transformers)
