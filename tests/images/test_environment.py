"""Environments that answer with images: rows that a trainer reads as they were drawn, and what is refused."""

from pathlib import Path
from typing import Any, cast

import numpy as np

import meshrl as rl
from meshrl.data import FINGERPRINTS, IMAGES, Images, name_of
from meshrl.mesh import Rank, rank_context
from meshrl.tasks.environment import FunctionEnvironment
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import floats
from tests.images.families import folder_of, picture

GAME = """
import io
from PIL import Image

def drawn(colour):
    return Image.new("RGB", (24, 20), colour)

class Game:
    def reset(self, row):
        self.turns, self.kind = 0, row["prompt"]
        return ["look ", drawn("red"), row["prompt"]]
    def step(self, completion):
        self.turns += 1
        if self.kind == "file":
            return [b"no image"], 0.0, False
        file = io.BytesIO()
        drawn((self.turns, 0, 0)).save(file, "PNG")
        return ["and ", file.getvalue(), "<image:%s>" % ("0" * 32)], 1.0, self.turns == 3
"""
TEMPLATE = "<user>{observation}<end><says>"


async def test_a_game_of_images_is_learned_as_it_was_drawn(tmp_path: Path) -> None:
    rank_context.set(Rank(threads=1))
    (tmp_path / "game.py").write_text(GAME, "utf-8")
    model, source = folder_of("qwen2_5_vl", tmp_path / "model"), f"{tmp_path / 'game.py'}:Game"
    config = rl.EnvironmentConfig(source=source, template=TEMPLATE)
    sampler = TorchSampler(rl.SamplerConfig(model=model, chat=True))
    episodes = rl.Episodes(sampler, FunctionEnvironment(config), config)
    row = Images.of([[picture(1)], []])
    prompts = rl.Batch.of(prompt=["play", "file"], row=[{}, {}], groups=np.arange(2), images=row)
    batch = await rl.rollout(episodes, prompts, rl.Sampling(n=2, max_tokens=4))
    batch = batch.select(np.argsort(batch.groups, kind="stable"))
    images = cast("Images", batch[IMAGES])
    assert [len(names) for names in images] == [3, 3, 1, 1], (
        "not what the last step shows, or the row's, which nobody saw"
    )
    assert images[0][0] == images[2][0]
    assert name_of(picture(1)) not in images.pool
    assert [len(cast("Any", each)) for each in batch.objects(FINGERPRINTS)] == [3, 3, 1, 1]
    assert str(batch.objects("completion")[0]).count("<image:") == 4
    errors = batch.objects("reward_error")
    assert errors[:2] == (None, None)
    assert all("no whole image" in str(error) for error in errors[2:])
    scored = await TorchPolicy(rl.PolicyConfig(model=model, chat=True)).logprobs(batch)
    learns = np.asarray(batch.loss_mask.values, np.bool_)
    found, drawn = floats(scored.ragged("logprobs").values), floats(batch.sampler_logprobs.values)
    np.testing.assert_allclose(found[learns], drawn[learns], atol=1e-5)
