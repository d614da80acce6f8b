"""Dialogues of several turns into tokens and masks, by a small chat template."""

import numpy as np
import pytest

from meshrl import Batch, DataError, NewModel, PolicyConfig
from meshrl_hf.dialogues import encode_messages
from meshrl_hf.text import END, Words, character_tokenizer, encode_completions, encode_prompts
from meshrl_torch.policy import TorchPolicy

CHARACTERS = "abcdSUA:\n"
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'S', 'user': 'U', 'assistant': 'A'}[m.role] or raise_exception('no role') }}"
    ":{{ m.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}")


def words(template: str | None = TEMPLATE, max_tokens: int = 64) -> Words:
    tokenizer = character_tokenizer(CHARACTERS, max_tokens)
    tokenizer.chat_template = template
    return Words(tokenizer, {}, frozenset({END}), max_tokens)


def messages(*turns: str) -> list[dict[str, str]]:
    """`U:ab` is what the user says."""
    roles = {"S": "system", "U": "user", "A": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def shown(one: Words, batch: Batch) -> list[str]:
    """Each row with its learned tokens in brackets; `.` is the end of a text, `/` a new line."""
    rows: list[str] = []
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        pieces = ["." if token == END else str(one.tokenizer.decode([token])) for token in tokens.tolist()]
        text = "".join(f"[{piece}]" if learned else piece for piece, learned in zip(pieces, mask.tolist(), strict=True))
        rows.append(text.replace("][", "").replace("\n", "/"))
    return rows


def test_the_assistants_turns_are_learned_up_to_their_end() -> None:
    one = words()
    long = messages("S:d", "U:ab", "A:ba", "U:c", "A:cc")
    rows = Batch.of(
        messages=[long, messages("U:a", "A:b"), long, [*long, *messages("U:d")]], learn=[*["all"] * 2, "last", "all"]
    )
    assert shown(one, encode_messages(one, rows)) == [
        "S:d./U:ab./A:[ba.]/U:c./A:[cc.]/",
        "U:a./A:[b.]/",
        "S:d./U:ab./A:ba./U:c./A:[cc.]/",
        "S:d./U:ab./A:[ba.]/U:c./A:[cc.]/",
    ]
    without = encode_messages(one, rows.drop("learn"))
    assert shown(one, without)[2] == "S:d./U:ab./A:[ba.]/U:c./A:[cc.]/"
    assert without.tokens.values.dtype == np.int32
    assert without.loss_mask.values.dtype == np.bool_


def test_a_dialogue_of_one_turn_is_a_prompt_and_its_completion() -> None:
    """What is trained is what is sampled: `encode` of a chat's prompt and completion gives the same tokens."""
    one = words()
    (found,) = encode_messages(one, Batch.of(messages=[messages("U:ab", "A:ba")])).tokens
    prompt = encode_prompts(one.tokenizer, ["ab"], chat={})[0]
    whole = [*prompt, *encode_completions(one.tokenizer, ["ba"])[0]]
    assert found.tolist()[: len(whole)] == whole
    none = encode_messages(one, Batch.of(messages=[]))
    assert (len(none), len(none.tokens), len(none.loss_mask)) == (0, 0, 0)


def test_a_template_that_rewrites_earlier_turns_is_taken_where_the_last_alone_is_learned() -> None:
    one = words(FORGETFUL)
    long = Batch.of(messages=[messages("U:ab", "A:ba", "U:c", "A:cc")])
    assert shown(one, encode_messages(one, long.assign(learn=["last"]))) == ["U:ab./A:./U:c./A:[cc.]/"]


def test_a_wrong_row_is_refused_in_words() -> None:
    cases: list[tuple[object, str, str]] = [
        (messages("U:ab"), "all", "row 0: its dialogue has no assistant's turn to learn"),
        (messages("U:ab", "A:b"), "first", 'row 0: `learn` is \'first\': use "all" or "last"'),
        ("U:ab", "all", "row 0: `messages` is 'U:ab': give a list of"),
        ([{"role": "user"}], "all", r"row 0: message 0 is \{'role': 'user'\}: give"),
        ([{"role": "tool", "content": "a"}, *messages("A:b")], "all", "row 0: the chat template refuses it: "),
        (messages("U:" + "ab" * 40, "A:b"), "all", "row 0 has 89 tokens and the model takes at most 64"),
        (messages("U:z", "A:b"), "all", "the text .* has 'z', which the tokenizer does not know"),
    ]
    for row, learn, message in cases:
        with pytest.raises(DataError, match=message):
            encode_messages(words(), Batch.of(messages=[row], learn=[learn]))


async def test_a_policy_encodes_dialogues() -> None:
    model = NewModel(characters=CHARACTERS, chat_template=TEMPLATE, hidden_size=16, layers=1, heads=2, max_tokens=64)
    rows = Batch.of(messages=[messages("U:ab", "A:b", "U:d", "A:a")])
    batch = await TorchPolicy(PolicyConfig(model=model)).encode(rows)
    assert shown(words(), batch) == ["U:ab./A:[b.]/U:d./A:[a.]/"]
