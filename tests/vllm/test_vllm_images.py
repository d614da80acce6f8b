"""Rows with images in vLLM, against a policy on the same model: what was seen, new weights, and running rows."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from meshrl import Batch, ClippedLoss, PolicyConfig, Sampling, Task, rollout
from meshrl.data import FINGERPRINTS
from meshrl.mesh import Rank, rank_context
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.image_models import PROVEN
from meshrl_vllm.sampler import VllmSampler
from tests.backends.material import floats
from tests.images.families import folder_of, picture
from tests.inference.conftest import Backend

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FIRST = ("llava", "qwen3_vl")
ROWS: list[dict[str, object]] = [
    {"image": picture(1), "question": "what is it?", "answer": "a"},
    {"image": [picture(2, 40, 24), picture(3)], "question": "which?", "answer": "b"},
    {"image": picture(4), "question": "what is it?", "answer": "a"},
    {"image": None, "question": "why?", "answer": "c"},
]
SHORT, LONG = Sampling(n=4, max_tokens=6), Sampling(n=8, max_tokens=100, ignore_eos=True)


def prompts() -> Batch:
    rows = Task.of(ROWS, images=["image"]).train
    return rows.assign(groups=np.arange(len(rows)))


async def drawn(sampler: VllmSampler, sampling: Sampling) -> Batch:
    batch = await (await rollout(sampler, prompts(), sampling)).load()
    return batch.assign(advantages=np.linspace(-1, 1, len(batch), dtype=np.float32))


async def apart(policy: TorchPolicy, batch: Batch, version: int) -> float:
    """How far log-probs of the tokens of a version are from a policy's, which checks what the sampler has seen."""
    known = floats((await policy.logprobs(batch)).ragged("logprobs").values)
    own = np.asarray(batch.versions.values) == version
    assert own.any()
    return float(np.abs(known - floats(batch.sampler_logprobs.values))[own].max())


@pytest.mark.parametrize(
    "family", [*FIRST, *(pytest.param(each, marks=pytest.mark.wide) for each in PROVEN if each not in FIRST)]
)
async def test_images_are_seen_as_the_policy_sees_them(family: str, tmp_path: Path) -> None:
    rank_context.set(Rank(threads=1))
    model = folder_of(family, tmp_path / "model", wide=True)
    config = PolicyConfig.model_validate(
        {"model": model, "chat": True, "train_vision": True, "micro_batch_tokens": 400, "optimizer": {"lr": 0.01}}
    )
    old, new = TorchPolicy(config), TorchPolicy(config)
    sampler = VllmSampler(Backend("vllm").config(model=model, chat=True, slots=8))
    batch = await drawn(sampler, SHORT)
    assert [len(cast("Any", each)) for each in batch.objects(FINGERPRINTS)] == [1] * 4 + [2] * 4 + [1] * 4 + [0] * 4
    assert await apart(old, batch, 0) < 1e-4
    await new.update(batch, ClippedLoss())
    assert await apart(new, batch, 0) > 1e-2
    weights = (await new.weights()).with_version(1)
    running = sampler.generate(prompts(), LONG)
    first = await anext(running)  # others begin when these end
    await sampler.load(weights)
    among = Batch.join([first, *[chunk async for chunk in running]])
    versions = [set(each.tolist()) for each in among.ragged("versions")]
    assert any({0, 1} <= own for own in versions), "rows that were running when the weights came"
    assert await apart(new, among, 1) < 1e-4
    again = await drawn(sampler, SHORT)  # the same images, which the old weights have read too
    assert await apart(new, again, 1) < 1e-4
    await sampler.load((await old.weights()).with_version(2))
    assert await apart(old, await drawn(sampler, SHORT), 2) < 1e-4
    sampler.close()
