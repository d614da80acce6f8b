"""The text of each token, against the tokenizer's own text of whole rows."""

from pathlib import Path

import pytest

from meshrl.errors import ModelError
from meshrl.roles import NewModel, PolicyConfig, token_reader

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("text", ["a word, and another\n", "héllo 你好 🙂🙂 x", "", "🙂"])
def test_the_texts_of_tokens_join_to_the_text_and_a_character_of_several_is_that_of_the_last(
    text: str, tmp_path: Path
) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={each: at for at, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    read = token_reader(PolicyConfig(backend="torch", model=str(tmp_path)))
    assert read is not None
    ids = made.encode(text).ids
    (texts,) = read([[*ids, len(letters)]])
    assert texts[-1] == "<end>"
    assert "".join(texts[:-1]) == text
    assert [each for each in texts[:-1] if each] == list(text)
    (cut,) = read([ids[:-1]])
    assert len(cut) == len(ids[:-1]), "also where a character is cut"


def test_a_new_model_has_a_token_for_each_character_and_one_without_tokenizer_is_refused(tmp_path: Path) -> None:
    read = token_reader(PolicyConfig(backend="torch", model=NewModel(characters="ab>")))
    assert read is not None
    assert read([[2, 3, 4, 1]]) == [["a", "b", ">", "<eos>"]]
    assert token_reader(PolicyConfig(backend="fake", model="none")) is None
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        token_reader(PolicyConfig(backend="torch", model=str(tmp_path)))
