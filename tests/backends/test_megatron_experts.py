"""Mixtures of experts in the Megatron backend, against the torch backend's numbers."""

from collections.abc import Callable, Iterable

import pytest
from transformers import Qwen3MoeConfig

from meshrl import Resources
from meshrl.testing.conformance import Check, Harness, Subject, checkpoints, name_of, numbers, state

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.megatron, pytest.mark.timeout(300)]

ONE = Subject("megatron")
EXPERTS = Subject("megatron", {"dp": 2}, "ray", {"megatron": {"experts": 2}})
PIPELINE = Subject("megatron", {"dp": 1, "pp": 2}, "ray")
SPLIT = Subject("megatron", {"dp": 1, "tp": 2}, "ray")
FOUR = Subject("megatron", {"dp": 2, "tp": 2}, "ray", {"megatron": {"experts": 2}}, Resources(cpus=0))

CHECKS = [
    *numbers.POLICY[:1],
    numbers.uneven_rows,
    numbers.log_probs,
    numbers.critic_updates,
    numbers.a_reference_takes_weights,
    state.weights,
    state.saving,
    checkpoints.a_policy_goes_on,
]
FEW = [*numbers.POLICY[:1], state.saving]


@pytest.fixture(scope="module")
def mixture(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two layers, with two of four experts for each token."""
    config = Qwen3MoeConfig(
        vocab_size=11,
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=40,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.15,
    )
    return random_model(config, tmp_path_factory.mktemp("mixture"), noise=0)


def pairs(checks: Iterable[Check], *subjects: Subject) -> list[object]:
    return [
        pytest.param(subject, check, id=f"{subject}-{name_of(check)}", marks=[pytest.mark.slow] * (subject is not ONE))
        for subject in subjects
        for check in checks
    ]


@pytest.mark.parametrize(
    ("harness", "check"), [*pairs(CHECKS, ONE, EXPERTS), *pairs(FEW, PIPELINE, SPLIT, FOUR)], indirect=["harness"]
)
async def test_a_mixture_conforms(harness: Harness, mixture: str, check: Check) -> None:
    await harness.run(check, mixture)
