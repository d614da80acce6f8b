"""Tokenizers with chat templates in the shapes of those that models have, and conversations with them."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from meshrl_torch.model.chat import HuggingFaceChat
from meshrl_torch.model.text import Words

LLAMA = """{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

Functions: {{ tools | tojson }}<|eot_id|>{% endif %}{% for message in messages %}\
{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('nobody called') }}\
{% endif %}<|start_header_id|>\
{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}\
{% endif %}{{ message.tool_calls[0].function | tojson }}{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>\
{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

QWEN = """{%- if messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- set last = namespace(query=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}\
{%- if message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\
{%- endif %}{{ '\n' }}<tool_response>
{{ message.content }}
</tool_response>{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{%- elif message.role == 'assistant' %}<|im_start|>assistant
{% set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{% if loop.index0 > last.query %}<think>
{{ message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' }}
</think>

{% endif %}{{ said }}{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SHAPES = {"llama": (LLAMA, "<|eot_id|>"), "qwen": (QWEN, "<|im_end|>")}
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class ShownChat(HuggingFaceChat):
    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self.words = words

    def shown(self, tokens: Any) -> str:
        return str(self.words.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))


@cache
def chat_of(shape: str) -> ShownChat:
    """A tokenizer of bytes and some words, as GPT-2's: an emoji is four tokens, and a text has many tokenisations."""
    template, end = SHAPES[shape]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and the assistant said hello to the user"] * 8, trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token=end, clean_up_tokenization_spaces=False
    )
    whole.chat_template = template
    ends: Any = whole.convert_tokens_to_ids(end)
    return ShownChat(Words(whole, None, frozenset({ends}), 4096, known=len(whole)))


@pytest.fixture(scope="session")
def chat() -> ShownChat:
    """Of the shape that puts a token before the first message, and wants a call before a tool's answer."""
    return chat_of("llama")


@pytest.fixture(scope="session")
def qwen() -> ShownChat:
    """Of the shape that leaves out the thoughts of earlier turns, and shows a tool's answer as the user's."""
    return chat_of("qwen")


@pytest.fixture(scope="session", params=SHAPES)
def each_chat(request: pytest.FixtureRequest) -> ShownChat:
    return chat_of(request.param)
