"""Images in requests to the gateway, by the real client: what the model sees, what is learned, and what is refused."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
from PIL import Image

from meshrl import Batch, ClippedLoss, PolicyConfig, SamplerConfig, Sampling
from meshrl.agents import Conversation, Drawn, Gateway, Message, read_chat
from meshrl.agents.chat import SeeingChat, check_images
from meshrl.agents.recording import Recording, recorded
from meshrl.data import FINGERPRINTS, IMAGES, Images, mark_of, name_of
from meshrl.data import opened as opened_image
from meshrl.errors import DataError
from meshrl.mesh import Rank, rank_context
from meshrl.tasks import Task, TaskConfig
from meshrl_torch.model import vision
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.agents.talks import opened
from tests.agents.test_messages import post
from tests.backends.material import floats
from tests.images.families import folder_of, picture

IMAGE = "<|image_pad|>"


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked(*parts: object) -> Any:
    texts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": "user", "content": texts}


def seen(data: bytes | str) -> Any:
    return {"type": "image_url", "image_url": {"url": url(data) if isinstance(data, bytes) else data}}


def test_what_was_seen_is_rendered_without_its_pixels_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = read_chat(SamplerConfig(model=folder_of("qwen2_5_vl", tmp_path / "model"), chat=True))
    assert isinstance(chat, SeeingChat)
    images = {name_of(file): file for file in (picture(1), picture(2, 40, 24))}
    messages, decoded = [Message("user", "".join(map(mark_of, images)))], list[str]()
    monkeypatch.setattr(vision, "_KEPT", 1)  # bytes of pixels

    def told(data: bytes, where: str) -> Image.Image:
        decoded.append(where)
        return opened_image(data, where)

    monkeypatch.setattr(vision, "opened", told)
    held = chat.see(images)
    assert len(decoded) == len(images)
    wanted = chat.render_seeing(messages, [], images)
    assert len(decoded) == len(images)
    del held
    assert chat.render_seeing(messages, [], images) == wanted
    assert len(decoded) > len(images)


def test_a_conversation_with_images_that_an_engine_does_not_take_is_refused_alone(tmp_path: Path) -> None:
    table = {"backend": "vllm", "model": folder_of("gemma3", tmp_path / "model"), "chat": True}
    with pytest.raises(DataError, match=r"this one's is gemma3: .* or send text alone"):
        check_images(read_chat(SamplerConfig.model_validate(table)))


async def test_a_talk_about_images_is_a_row_to_learn_from(tmp_path: Path) -> None:
    rank_context.set(Rank(threads=1))
    config = SamplerConfig(model=folder_of("qwen2_5_vl", tmp_path / "model"), chat=True)
    chat, sampler = read_chat(config), TorchSampler(config)
    gateway, one, other = Gateway(sampler, chat), picture(1), picture(2, 40, 24)
    async with opened(gateway, Sampling(max_tokens=4)) as talk:
        messages = [asked("what is ", seen(one), "?")]
        told = await talk.ask(messages)
        messages += [told.choices[0].message, asked(seen(other), "and this?")]
        await talk.ask(messages)
        written: Any = {"type": "input_image", "image_url": url(one), "detail": "auto"}
        whole: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}, written]}]
        await talk.client.responses.create(model="any", input=whole)
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(one).decode()}
        block: Any = {"type": "image", "source": source}
        parts: Any = [{"type": "text", "text": "what is "}, block, {"type": "text", "text": "?"}]
        counted = await post(talk, "messages/count_tokens", messages=[{"role": "user", "content": parts}])
        assert counted.json() == {"input_tokens": told.usage.prompt_tokens}
        result = {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{**block, "source": {"type": "url", "url": "a"}}],
        }
        refused = await post(talk, messages=[{"role": "user", "content": [result]}])
        assert (refused.status_code, "not fetched" in refused.text) == (400, True)
        for wrong, why in {
            "https://example.org/a.png": "not fetched from other hosts",
            url(b"no image"): "no whole image",
            "data:image/png,abc": "write a data URL",
        }.items():
            with pytest.raises(openai.BadRequestError, match=why):
                await talk.ask([asked(seen(wrong))])
        many = [seen(picture(seed, 4, 4)) for seed in range(65)]
        with pytest.raises(openai.BadRequestError, match="65 different images, and at most 64"):
            await talk.ask([asked(*many)])
        with pytest.raises(openai.BadRequestError, match="assistant's message has an image"):
            await talk.ask([{**asked(seen(one)), "role": "assistant"}, asked("and?")])
        for backends, why in ((("http", ""), "sampler's backend 'http'"), (("torch", "megatron"), "policy's backend")):
            chat.backends = backends
            with pytest.raises(openai.BadRequestError, match=f"{why}.* takes none"):
                await talk.ask([asked(seen(one))])
        chat.backends = "torch", ""
        lines, conversation = tmp_path / "rows.jsonl", talk.session.conversation
        assert sorted(len(cast("Any", each)) for each in conversation.rows().objects(FINGERPRINTS)) == [1, 2]
        with Recording(lines, chat) as recording:
            recording.add([("s", *conversation.take(first)) for first in conversation.sizes()])
        rows = talk.rows()
    assert not len(rows)
    kept = Task.load(TaskConfig(source=str(lines), prompt="{prompt}", answer="{completion}", held_out=0)).train
    rows = recorded(kept)
    assert sorted(map(list, cast("Images", rows[IMAGES]))) == sorted([[name_of(one), name_of(other)], [name_of(one)]])
    policy = TorchPolicy(PolicyConfig(model=config.model, chat=True))
    scored = await policy.logprobs(rows)
    learns = np.asarray(rows.loss_mask.values, np.bool_)
    found, wanted = floats(scored.ragged("logprobs").values), floats(rows.sampler_logprobs.values)
    np.testing.assert_allclose(found[learns], wanted[learns], atol=1e-5)
    await policy.update(Batch(rows.columns).assign(advantages=np.ones(len(rows), np.float32)), ClippedLoss())


def test_a_text_that_looks_like_an_image_is_a_text_and_files_leave_with_their_rows(tmp_path: Path) -> None:
    config = SamplerConfig(model=folder_of("qwen2_5_vl", tmp_path / "model"), chat=True)
    chat, one, other = read_chat(config), picture(1), picture(2, 40, 24)
    conversation = Conversation(chat)
    conversation.ask([Message("user", mark_of(name_of(other)))], images={name_of(other): other})  # is never answered
    said = Message("assistant", mark_of("0" * 32))
    drawn = Drawn(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), 1.0)
    messages, files = [Message("user", mark_of(name_of(one)))], {name_of(one): one}
    conversation.answer(conversation.ask(messages, images=files), drawn, said)
    prompt = conversation.ask([*messages, said, Message("user", "and?")], images=files)
    assert prompt.before is not None
    conversation.answer(prompt, drawn, said)
    (first,) = conversation.sizes()
    images = cast("Images", conversation.take(first)[0][IMAGES])
    assert (list(images), images.pool) == ([(name_of(one),)], files)
    conversation.answer(conversation.ask_text("a"), replace(drawn, truncated=True), "b")
    with pytest.raises(DataError, match="stands for one"):
        conversation.ask_text("ab" + IMAGE)
    assert len(conversation.ask_text(mark_of("0" * 32)).tokens)
