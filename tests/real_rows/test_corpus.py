"""The shapes of 40 published tokenizers and templates: what is learned is what transformers alone marks or renders."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from meshrl.data import BASE, Batch, Ragged, Source
from meshrl.roles import Sampling
from meshrl_torch.model.rows import encoded
from meshrl_torch.model.text import Words
from meshrl_torch.sample.rollouts import Rollouts
from tests.real_rows.shapes import SHAPES, Shape

ASKED, CODE = "what is 1 + 2?", "def f(x):\n    return x"
ONE = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": CODE}]
TWO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes no"}, *ONE]
EACH = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


@cache
def made(shape: Shape) -> tuple[Any, Words]:
    tokenizer = shape.tokenizer()
    return tokenizer, shape.words(tokenizer)


def rendered(shape: Shape, messages: Any, **options: Any) -> str:
    return str(made(shape)[0].apply_chat_template(messages, tokenize=False, **dict(shape.variables), **options))


def marked(shape: Shape, messages: Any) -> tuple[list[int], list[bool]]:
    """The tokens and the mask of transformers, without what a prompt has, and with an end if the template has none."""
    tokenizer, known = made(shape)
    told = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **dict(shape.variables)
    )
    ids, mask = list(told["input_ids"]), np.array(told["assistant_masks"], bool)
    text = rendered(shape, messages)
    ends = np.array(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])[:, 1]
    for at in range(1, len(messages), 2):
        before, prompt = (rendered(shape, messages[:at], add_generation_prompt=opens) for opens in (False, True))
        if text.startswith(prompt):
            mask &= (ends <= len(before)) | (ends > len(prompt))
    if not shape.closes:
        last = max(np.flatnonzero(mask)) + 1
        ids, mask = [*ids[:last], tokenizer.eos_token_id], np.append(mask[:last], True)
    assert ids[max(np.flatnonzero(mask))] in known.ends, "the last token that is learned is an end"
    return ids, mask.tolist()


def row(batch: Batch) -> tuple[list[int], list[bool]]:
    return batch.tokens[0].tolist(), np.asarray(batch.loss_mask[0], bool).tolist()


def said(known: Words, batch: Batch) -> str:
    """The completion's text, as any sampler gives it: the row has ended, so that nothing is drawn."""
    zeros = [[0] * len(tokens) for tokens in batch.tokens]
    rollouts = Rollouts(
        known,
        batch.assign(
            sampler_logprobs=Ragged.of(zeros, np.float32, source=Source("sampler")),
            versions=Ragged.of(zeros, np.int32),
        ),
        Sampling(max_tokens=400),
    )
    assert not len(rollouts.request.rows), "a sampler stops at the end that was learned"
    finished = rollouts.batch(rollouts.ended, {BASE: 0})
    assert not finished.row("truncated")[0]
    return str(finished.objects("completion")[0])


@EACH
@pytest.mark.parametrize("messages", [ONE, TWO], ids=["one", "two"])
def test_messages_learn_what_the_template_marks(shape: Shape, messages: Any) -> None:
    _, known = made(shape)
    assert row(encoded(known, Batch.of(messages=[messages]))) == marked(shape, messages)


@EACH
def test_a_prompt_with_its_completion_learns_the_same(shape: Shape) -> None:
    tokenizer, known = made(shape)
    batch = encoded(known, Batch.of(prompt=[ASKED], completion=[CODE]))
    ids, mask = marked(shape, ONE)
    last = max(np.flatnonzero(mask))
    assert row(batch) == (ids[: last + 1], mask[: last + 1])
    text = rendered(shape, ONE)
    if shape.kind != "wordpiece":  # which writes no spaces of its own
        seen = said(known, batch)
        assert CODE in seen
        assert (text.rpartition(tokenizer.decode(ids[last]))[0] or text.rstrip()).endswith(seen)


@pytest.mark.parametrize("shape", [each for each in SHAPES if each.think], ids=lambda shape: shape.name)
def test_a_thought_is_learned_and_seen_once_and_whole(shape: Shape) -> None:
    """Also where the template drops it from an answer: then the answer follows its prompt as it was drawn."""
    tokenizer, known = made(shape)
    begin, end = shape.think or ("", "")
    answer = f"{begin}\nhm\n{end}\n\nyes"
    text = rendered(shape, [ONE[0], {"role": "assistant", "content": answer}])
    prompt = rendered(shape, ONE[:1], add_generation_prompt=True)
    ids, mask = marked(shape, ONE)
    closes = tokenizer.decode(ids[max(np.flatnonzero(mask))])
    if "hm" not in text:
        text = prompt + answer.removeprefix(shape.opened) + closes
    text = text.rstrip().removesuffix(closes) + closes
    batch = encoded(known, Batch.of(prompt=[ASKED], completion=[answer]))
    ids, mask = row(batch)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    learned = tokenizer.decode([token for token, is_learned in zip(ids, mask, strict=True) if is_learned])
    assert learned == text[len(prompt) :]
    assert said(known, batch) == shape.opened + learned.removesuffix(closes)
    assert "".join(said(known, batch).split()) == "".join(answer.split())
