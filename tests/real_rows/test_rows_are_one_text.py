"""A row is one text when it is encoded: its tokens are those that transformers makes of the whole text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import ByT5Tokenizer, LlamaConfig

from meshrl.agents import Message
from meshrl.agents.conversation import Conversation, Drawn
from meshrl.data import Batch, Ragged, Source
from meshrl.errors import DataError
from meshrl.roles import PolicyConfig, RewardTrainingConfig, SamplerConfig, Sampling
from meshrl_torch.model import rows
from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.text import Words, words
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy, TorchRewardModel
from tests.real_rows.tiny_tokenizers import BOS, CHATML, CLOSE, END, made, save

SCHEMES = ["bytes", "always", "first", "never"]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FORGETFUL = PLAIN.replace("{{ m.content }}", "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}")
CODE = "def f(x):\n    return x"
TURNS = [
    {"role": role, "content": text} for role, text in [("user", "hello"), ("assistant", "yes no"), ("user", "1 + 2")]
]
TURNS.append({"role": "assistant", "content": CODE})


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def learned(tokenizer: Any, batch: Batch) -> list[list[str]]:
    return [
        tokenizer.convert_ids_to_tokens(np.asarray(row)[np.asarray(mask, bool)].tolist())
        for row, mask in zip(batch.tokens, batch.loss_mask, strict=True)
    ]


def known(tokenizer: Any, chat: bool = True) -> Words:
    return words(tokenizer, LlamaConfig(vocab_size=len(tokenizer)), None, {} if chat else None)


async def encoded(folder: Path, tokenizer: Any, chat: bool = True, **columns: Any) -> Batch:
    return await TorchPolicy(PolicyConfig(model=save(folder, tokenizer), chat=chat)).encode(Batch.of(**columns))


@pytest.mark.parametrize("puts", ["$A", f"{BOS} $A", f"$A {END}", f"{BOS} $A {END}", f"{END} $A"])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_prompt_has_what_the_tokenizer_puts_before_it_once(scheme: str, puts: str, tmp_path: Path) -> None:
    tokenizer = made(scheme, puts=puts)
    first = puts.split(" ", maxsplit=1)[0]
    prefix = [] if first == "$A" else ids(tokenizer, first)
    folder = save(tmp_path, tokenizer)
    for chat, prompt, wanted in (
        (False, "1 + 2", [*prefix, *ids(tokenizer, "1 + 2")]),
        (False, f"{BOS}1", [*(prefix if first == END else []), *ids(tokenizer, f"{BOS}1")]),
        (True, "yes", ids(tokenizer, tokenizer.apply_chat_template([{"role": "user", "content": "yes"}],
                                                                  tokenize=False, add_generation_prompt=True))),
    ):  # fmt: skip
        sampler = TorchSampler(SamplerConfig(model=folder, chat=chat))
        (row,) = [each async for each in sampler.generate(Batch.of(prompt=[prompt]), Sampling(max_tokens=1))]
        assert row.tokens[0].tolist()[:-1] == wanted
    batch = await TorchPolicy(PolicyConfig(model=folder)).encode(Batch.of(prompt=["hello"], completion=[" world"]))
    assert batch.tokens[0].tolist() == [*prefix, *ids(tokenizer, "hello world"), *ids(tokenizer, END)]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_steps_are_of_one_text(scheme: str, tmp_path: Path) -> None:
    tokenizer = made(scheme, puts=f"{BOS} $A {END}")
    judge = TorchRewardModel(RewardTrainingConfig(model=save(tmp_path, tokenizer)))
    batch = await judge.encode(Batch.of(prompt=["hello\n"], steps=[["1 + 2\n", "yes"]]))
    assert batch.tokens[0].tolist() == tokenizer("hello\n1 + 2\nyes")["input_ids"]
    places = np.flatnonzero(batch.loss_mask[0])
    assert tokenizer.decode(batch.tokens[0].tolist()[: places[0] + 1], skip_special_tokens=True) == "hello\n1 + 2\n"
    assert places[-1] == len(batch.tokens[0]) - 1


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_what_follows_drawn_tokens_is_the_middle_of_a_text(scheme: str, tmp_path: Path) -> None:
    """An environment's observation, and the next message of an agent's conversation."""
    tokenizer = made(scheme, PLAIN)
    sampler = TorchSampler(SamplerConfig(model=save(tmp_path, tokenizer)))
    for said in ("yes", f"yes{END}"):
        had, whole = ids(tokenizer, f"hello\n{said}"), ids(tokenizer, f"hello\n{said}\nreturn x")
        begun = Batch.of(
            tokens=Ragged.of([had], np.int32), loss_mask=Ragged.of([[False, *[True] * (len(had) - 1)]], np.bool_),
            sampler_logprobs=Ragged.of([[0.0] * len(had)], np.float32, source=Source("sampler")),
            versions=Ragged.of([[0] * len(had)], np.int32), observation=["\nreturn x"],
        )  # fmt: skip
        (row,) = [each async for each in sampler.generate(begun, Sampling(max_tokens=len(whole)))]
        assert row.tokens[0].tolist()[: len(whole)] == whole
    chat = HuggingFaceChat(known(tokenizer))
    conversation, user = Conversation(chat), Message("user", "hello")
    asked = conversation.ask([user])
    drawn = np.array(ids(tokenizer, f"<|assistant|>\nyes no{END}")[len(ids(tokenizer, "<|assistant|>\n")) :], np.int32)
    conversation.answer(
        asked, Drawn(drawn, np.zeros(len(drawn), np.float32), drawn * 0, 1.0), Message("assistant", "yes no")
    )
    more = conversation.ask([user, Message("assistant", "yes no"), Message("user", "1 + 2")])
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes no"}, TURNS[2]]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    assert more.tokens.tolist() == ids(tokenizer, text)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strips", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("said", [" yes", "\n\n yes ", "yes "])
def test_spaces_that_special_tokens_take_are_theirs(said: str, strips: dict[str, bool], scheme: str) -> None:
    tokenizer = made(scheme, "{% for m in messages %}<s>{{ m.content }}<|im_end|>{% endfor %}"
                     "{% if add_generation_prompt %}<s>{% endif %}")  # fmt: skip
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(each, **strips) for each in (BOS, CLOSE)])
    whole = ids(tokenizer, f"<s>hello<|im_end|><s>{said}<|im_end|>")
    for chat, row in ((True, {"prompt": ["hello"]}), (False, {"prompt": ["<s>hello<|im_end|><s>"]})):
        batch = rows.encoded(known(tokenizer, chat), Batch.of(completion=[said + CLOSE * (not chat)], **row))
        assert batch.tokens[0].tolist() == whole
        start = len(whole) - whole[::-1].index(tokenizer.bos_token_id)
        assert np.asarray(batch.loss_mask[0], int).tolist() == [0] * start + [1] * (len(whole) - start)
    chat_of = HuggingFaceChat(known(tokenizer))
    for had in ("<s>", "hello<|im_end|>", "hello<|im_end|><s>"):
        before = ids(tokenizer, had)
        assert [*before, *chat_of.encode(said + "<|im_end|>", before)] == ids(tokenizer, f"{had}{said}<|im_end|>")


async def test_a_tokenizer_without_offsets(tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer(chat_template=PLAIN)
    batch = await encoded(tmp_path, tokenizer, messages=[TURNS])
    assert batch.tokens[0].tolist() == ids(tokenizer, str(tokenizer.apply_chat_template(TURNS, tokenize=False)))
    assert "".join(learned(tokenizer, batch)[0]) == f"yes no</s>{CODE}</s>"


def test_all_turns_of_the_assistant_are_learned_or_the_last_alone() -> None:
    tokenizer, whole = made(), f"yes no{CLOSE}{CODE}{CLOSE}"
    batch = Batch.of(messages=[TURNS, TURNS, [*TURNS, TURNS[0]]], learn=["all", "last", "all"])
    for given, texts in ((batch, [whole, f"{CODE}{CLOSE}", whole]), (batch.drop("learn"), [whole] * 3)):
        found = rows.encoded(known(tokenizer), given)
        learns = [np.asarray(mask, bool) for mask in found.loss_mask]
        assert [tokenizer.decode(row[own].tolist()) for row, own in zip(found.tokens, learns, strict=True)] == texts
    assert [each.values.dtype.name for each in (found.tokens, found.loss_mask)] == ["int32", "bool"]
    tokenizer = made("bytes", FORGETFUL)  # a template that rewrites earlier turns serves where the last one is learned
    found = rows.encoded(known(tokenizer), Batch.of(messages=[TURNS], learn=["last"]))
    assert tokenizer.decode(found.tokens[0][np.asarray(found.loss_mask[0], bool)].tolist()) == f"{CODE}{END}"


@pytest.mark.parametrize(
    ("messages", "learn", "said"),
    [
        (TURNS[:1], "all", "row 0: its dialogue has no assistant's turn to learn"),
        (TURNS, "first", 'row 0: `learn` is \'first\': use "all" or "last"'),
        ("hello", "all", "row 0: `messages` is 'hello': give a list of"),
        ([{"role": "user"}], "all", r"row 0: `messages`: message 0 is \{'role': 'user'\}: give"),
        ([{"role": "tool", "content": "a"}, TURNS[1]], "all", "row 0: the chat template refuses it: "),
    ],
)
def test_a_wrong_dialogue_is_refused_in_words(messages: object, learn: str, said: str) -> None:
    refuses = "{{ raise_exception('no role') if messages[0].role == 'tool' }}" + PLAIN
    with pytest.raises(DataError, match=said):
        rows.encoded(known(made("bytes", refuses)), Batch.of(messages=[messages], learn=[learn]))


async def test_calls_of_tools_are_learned_as_the_template_writes_them(tmp_path: Path) -> None:
    template = PLAIN.replace("m.content ", "m.tool_calls[0].function.name if m.tool_calls else m.content ")
    tokenizer = made("bytes", template)
    call: Any = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}], "language": "a"}
    turns = [TURNS[0], call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "yes"}]
    batch = await encoded(tmp_path, tokenizer, messages=[turns, turns[:2]])
    assert ["".join(each) for each in learned(tokenizer, batch)] == ["f</s>yes</s>", "f</s>"]
    with pytest.raises(DataError, match="leaves out a part of message 1, 'I call'"):
        await encoded(tmp_path, tokenizer, messages=[[turns[0], {**call, "content": "I call"}]])
    with pytest.raises(DataError, match=r"leaves out a part of message 1, .*'f'"):
        rows.encoded(known(made("bytes", PLAIN)), Batch.of(messages=[turns]))


SAID = '<think>\nhm</think>no < "yes" \ue000\n'


@pytest.mark.parametrize(
    "how", ["upper", "replace('n', 'NN')", "tojson", "trim | escape", "replace('\n', ' ')", "title"]
)
def test_a_text_that_a_template_rewrites_is_learned_as_it_writes_it(how: str) -> None:
    said = f"{{% generation %}}{{{{ m.content | {how} }}}}<|im_end|>{{% endgeneration %}}\n"
    plain = "{{ m.content }}<|im_end|>\n"
    template = CHATML.replace(plain, f"{{% if m.role == 'user' %}}{plain}{{% else %}}{said}{{% endif %}}")
    tokenizer = made("bytes", template, end=CLOSE)
    turns = [TURNS[0], {"role": "assistant", "content": SAID}] * 2
    told = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    batch = rows.encoded(known(tokenizer), Batch.of(messages=[turns]))
    assert batch.tokens[0].tolist() == told["input_ids"]
    assert np.asarray(batch.loss_mask[0], int).tolist() == told["assistant_masks"]


CUTS = ["content[:4]", "content | replace('h', '')", "content | replace('<think>', '')", "content | urlencode"]


@pytest.mark.parametrize("how", [*CUTS, "content.split('>')[-1] | upper"])
def test_a_text_of_which_a_template_leaves_out_more_than_its_beginning_is_refused(how: str) -> None:
    said = f"{{{{ m.{how} if m.role == 'assistant' else m.content }}}}"
    tokenizer = made("bytes", CHATML.replace("{{ m.content }}", said))
    with pytest.raises(DataError, match=r"template of .* leaves out a part of message 1, '<think>.nhm</think>no"):
        rows.encoded(known(tokenizer), Batch.of(prompt=["hello"], completion=[SAID]))


@pytest.mark.parametrize("chat", [False, True])
def test_what_follows_an_end_is_refused(chat: bool) -> None:
    batch = Batch.of(prompt=["hello"] * 2, completion=[f"yes{END}\n", f"yes{END} no"])
    with pytest.raises(DataError, match=rf"row 1: ' no' follows '{END}', which ends a text"):
        rows.encoded(known(made(), chat), batch)
