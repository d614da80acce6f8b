"""The chat format of a Hugging Face model, and the lengths of prompts: its tokenizer and template alone, no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from meshrl.agents import CallForm, Message, Tool, families, form_of
from meshrl.data import Batch, Constraint, Images, names_in
from meshrl.errors import BackendError, DataError, ModelError, described
from meshrl.roles import ModelConfig, NewModel, RewardModelConfig, RewardTrainingConfig, Sampling, masks_of
from meshrl_torch.model.decoding import completion_texts
from meshrl_torch.model.loading import folder_of, new_config, new_tokenizer, new_vision, read_words
from meshrl_torch.model.masks import check_grammar, grammars_of, plain_lark
from meshrl_torch.model.rows import encoded, judged
from meshrl_torch.model.text import (
    Template,
    Words,
    added_tokens,
    around_message,
    encode_after,
    encode_prompts,
    encode_texts,
    in_template,
    prompts_of,
    words,
)
from meshrl_torch.model.vision import images_of


class HuggingFaceChat:
    """Implements `meshrl.agents.Chat`."""

    def __init__(self, known: Words, variables: Template | None = None) -> None:
        """`variables`: for the chat template. ModelError if the tokenizer has no template."""
        if not known.tokenizer.chat_template:
            raise ModelError(
                f"agents need a chat template, and the tokenizer of {known.tokenizer.name_or_path or 'this model'} "
                "has none: use an instruction-tuned model, or set chat_template in its tokenizer_config.json"
            )
        self.ends = known.ends
        self.max_tokens = known.max_tokens
        self.native_tokens = known.native_tokens
        self.words = known
        self._bare = replace(known, chat=None)
        self._tokenizer = known.tokenizer
        self._variables = variables or {}
        self.backends: tuple[str, str] = ("torch", "")
        self.unseen = ""

    @cached_property
    def _form(self) -> CallForm | None:
        return form_of(
            lambda turns, tools, opens: in_template(self._tokenizer, turns, self._variables, opens=opens, tools=tools),
            self.words.end_texts,
        )

    @property
    def calls(self) -> CallForm:
        """The form of calls in the chat template. DataError if it writes none that could be read."""
        if self._form is None:
            raise DataError(
                "the model's chat template writes a call of a tool in no form that is read, so no answer can be held "
                f'to one: leave tool_choice at "auto" and send no tools with a format, or take a model of these '
                f"families: {families()}"
            )
        return self._form

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render messages in the template. DataError if it refuses them."""
        return self.render_seeing(messages, tools, {})

    @property
    def sees(self) -> bool:
        """True if the model sees images."""
        return self.words.vision is not None

    def see(self, images: Mapping[str, bytes]) -> Sequence[object]:
        """Let the processor read images, in any thread. DataError for one that cannot be read."""
        if (vision := self.words.vision) is None:
            return ()
        return vision.hold(Images([[*images]], images), [*images], "an image of a message")

    def render_seeing(self, messages: Sequence[Message], tools: Sequence[Tool], images: Mapping[str, bytes]) -> str:
        """Render messages with what stands for their images. DataError also if the model sees none."""
        try:
            try:
                text = self._in_template(messages, tools, as_text=False)
            except TypeError:  # a template such as DeepSeek's puts arguments between other texts
                text = self._in_template(messages, tools, as_text=True)
        except Exception as error:
            raise DataError(f"the model's chat template refuses these messages: {described(error)}") from error
        names = [name for message in messages for name in names_in(message.content)]
        return self.words.put(text, names, Images([names], images), "the conversation").text

    def _in_template(self, messages: Sequence[Message], tools: Sequence[Tool], *, as_text: bool) -> str:
        turns = [message.shown(as_text=as_text) for message in messages]
        return in_template(self._tokenizer, turns, self._variables, opens=True, tools=tools)

    def encode(self, text: str, after: Sequence[int] = ()) -> Sequence[int]:
        """Encode a text, which may contain special tokens by name, as it continues tokens."""
        if after:
            return encode_after(self._tokenizer, [after], [text])[0]
        return encode_texts(self._tokenizer, [text])[0]

    def begin(self, text: str) -> Sequence[int]:
        """Encode a prompt without messages, after what the tokenizer puts before a text."""
        return encode_prompts(self._bare, [text])[0]

    def decode(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        """Decode tokens that continue others, without those that end a text."""
        return completion_texts(self.words, [tokens], [after])[0]

    def check(self, constraint: Constraint) -> None:
        """Raise DataError if the sampler cannot begin an answer under a constraint, or llguidance is missing."""
        masks = masks_of(self.backends[0])
        try:
            check_grammar(constraint)
            if masks == "served":
                plain_lark(self.words, constraint)
            elif masks == "trained":
                grammars_of(self.words).begin(constraint.text, (), "a request")
        except BackendError as error:
            raise DataError(str(error)) from error


def read_chat(config: ModelConfig) -> HuggingFaceChat:
    """Read the chat format of the model in a role's table. ModelError if it has no template."""
    return HuggingFaceChat(words_of(config), config.chat_template_kwargs)


def words_of(config: ModelConfig) -> Words:
    """Read how the model in a role's table encodes and decodes texts, without loading the model."""
    if not isinstance(config.model, NewModel):
        return read_words(config, folder_of(config.model))
    tokenizer = new_tokenizer(config.model)
    shape, vision = new_config(config.model, tokenizer), new_vision(config.model, tokenizer)
    return words(tokenizer, shape, None, config.template, vision)


def _is_here(config: ModelConfig) -> bool:
    """False for a model that must first be downloaded, or converted."""
    model = config.model
    return isinstance(model, NewModel) or (Path(model).expanduser() / "config.json").is_file()


def find_ends(config: ModelConfig, sampling: Sampling) -> str | None:
    """Say which end of an assistant's turn no token and no stop text has. None if all is well, or the model not here.

    ModelError if no token could end a completion. DataError for an unknown one of `sampling.stop_tokens`.
    """
    if not _is_here(config):
        return None
    known = words_of(config)
    stops = known.stops(sampling)
    if sampling.ignore_eos and not stops and not sampling.stop:
        return f"sampling.ignore_eos: every completion goes on to sampling.max_tokens = {sampling.max_tokens}"
    tail = around_message(known.tokenizer, config.chat_template_kwargs)[1].strip() if config.chat else ""
    texts = [text for text, token in added_tokens(known.tokenizer).items() if token in stops]
    if not tail or any(text in tail for text in (*texts, *sampling.stop)):
        return None
    return (
        f"chat = true, and the template ends an assistant's turn with {tail!r}, at which nothing stops: a completion "
        f"that ends so goes on to max_tokens. The ends are {', '.join(map(repr, (*texts, *sampling.stop)))}"
        f"{', without those of the model (ignore_eos)' if sampling.ignore_eos else ''}. Add it to the tokenizer, or to "
        "sampling.stop, or if it is a token, to sampling.stop_tokens"
    )


def count_rows(config: ModelConfig, rows: Batch) -> Sequence[int | str] | None:
    """Count the tokens of each prompt, or of the whole row if there are completions, or say why it cannot be read.

    Rows are encoded as the table's role does. None for a model that must first be downloaded, or converted. ModelError
    for a folder without a tokenizer, or a tokenizer without an end.
    """
    if not _is_here(config):
        return None
    known, judges = words_of(config), isinstance(config, RewardModelConfig | RewardTrainingConfig)

    def lengths(some: Batch) -> list[int]:
        if not {"completion", "messages", "steps"}.isdisjoint(some.names):
            return list(map(len, (judged if judges else encoded)(known, some).tokens))
        places = [some.place(row) for row in range(len(some))]
        coded = encode_prompts(known, prompts_of(some, known.chat), images_of(some), places)
        for row, ids in enumerate(coded):
            known.check_known(ids, some.place(row))
        return [len(ids) for ids in coded]

    def one(row: int) -> int | str:
        try:
            return lengths(rows.select([row]))[0]
        except Exception as error:  # noqa: BLE001 -- a template may raise anything
            why = str(error) if isinstance(error, DataError) else f"the chat template refuses it: {described(error)}"
            return why if rows.place(row) in why else f"{rows.place(row)}: {why}"

    try:
        return lengths(rows)
    except Exception:  # noqa: BLE001 -- one row fails, and is found below
        return [one(row) for row in range(len(rows))]
