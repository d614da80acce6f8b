"""Count the tokens of prompts, with a model's tokenizer alone."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshrl.errors import DataError, described
from meshrl.roles import ModelConfig, NewModel
from meshrl_hf.files import folder_of
from meshrl_hf.loading import quiet, read_tokenizer
from meshrl_hf.text import character_tokenizer, encode_prompts


def count_prompts(config: ModelConfig, prompts: Sequence[str]) -> Sequence[int | str] | None:
    """Count the tokens of each prompt, in the chat template if configured, or say why it cannot be read.

    None for a model that must first be downloaded, or converted. ModelError if a folder has no tokenizer.
    """
    tokenizer = _tokenizer(config.model)
    if tokenizer is None:
        return None
    try:
        return [len(tokens) for tokens in encode_prompts(tokenizer, prompts, config.template)]
    except Exception:  # noqa: BLE001 -- one prompt fails, and is found below; a template may raise anything
        return [_one(tokenizer, prompt, config) for prompt in prompts]


def _one(tokenizer: PreTrainedTokenizerBase, prompt: str, config: ModelConfig) -> int | str:
    try:
        return len(encode_prompts(tokenizer, [prompt], config.template)[0])
    except DataError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- a template may raise anything
        return f"the chat template refuses {prompt[:60]!r}: {described(error)}"


def _tokenizer(model: str | NewModel) -> PreTrainedTokenizerBase | None:
    if isinstance(model, NewModel):
        return character_tokenizer(model.characters, model.max_tokens, model.chat_template)
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        return None
    with quiet():
        return read_tokenizer(model, folder_of(model))
