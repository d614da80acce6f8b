"""Tokenizers and templates in the shapes of published models, made small. `{% generation %}` marks what is learned."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from meshrl_torch.model.text import Words, words

LINES: Final = [
    "the user asks what is 1 + 2", "yes no", "def f(x):\n    return x", "assistant user system model", "hello world?",
    "hm\n\nyes", "User: Assistant: USER ASSISTANT", "### Instruction:\n\n### Response:\n", "[INST] [/INST]",
]  # fmt: skip


def _trained(tokenizer: Any, trainer: Any, specials: Sequence[str], **options: Any) -> Any:
    tokenizer.train_from_iterator(
        LINES * 3, trainer(vocab_size=420, special_tokens=list(specials), show_progress=False, **options)
    )
    return tokenizer


def _bytes(specials: Sequence[str], split: str = "", prefix: bool = False) -> Any:
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    pieces = [pre_tokenizers.Split(Regex(split), "isolated"), level] if split else [level]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(pieces), decoders.ByteLevel()
    return _trained(made, trainers.BpeTrainer, specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _alphabet(specials: Sequence[str]) -> list[str]:
    return sorted({*"".join([*LINES, *specials]), *"▁.,:;[]{}<>/\\|_'\"!-=+?"})


def _spaced(scheme: str, model: Any = models.BPE, trainer: Any = trainers.BpeTrainer) -> Callable[..., Any]:
    """SentencePiece as tokenizers has it: a space before a text always, before the first part of it, or never."""

    def made(specials: Sequence[str]) -> Any:
        unigram = model is models.Unigram
        one = Tokenizer(model() if unigram else model(unk_token=None))
        one.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        one.decoder = decoders.Metaspace(prepend_scheme=scheme)
        options: dict[str, Any] = {"unk_token": specials[0]} if unigram else {}
        return _trained(one, trainer, specials, initial_alphabet=_alphabet(specials), **options)

    return made


def _llama(prepend: bool) -> Callable[..., Any]:
    """SentencePiece as Llama 2 has it, with bytes for what is unknown, or without a space of its own, as Gemma."""

    def made(specials: Sequence[str]) -> Any:
        one = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
        spaces: list[Any] = [normalizers.Prepend("▁")] if prepend else []
        one.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prepend else []
        one.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        byte = [f"<0x{value:02X}>" for value in range(256)]
        alphabet = [each for each in _alphabet(specials) if each != "\n"]
        one = _trained(one, trainers.BpeTrainer, [*specials, *byte], initial_alphabet=alphabet, max_token_length=6)
        table = json.loads(one.to_str())  # the bytes are in the vocabulary, and no special tokens
        table["added_tokens"] = [each for each in table["added_tokens"] if each["content"] not in byte]
        return Tokenizer.from_str(json.dumps(table))

    return made


def _wordpiece(specials: Sequence[str]) -> Any:
    made = Tokenizer(models.WordPiece(unk_token=specials[0]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return _trained(made, trainers.WordPieceTrainer, specials, initial_alphabet=_alphabet(specials))


def _wordlevel(specials: Sequence[str]) -> Any:
    made = Tokenizer(models.WordLevel(unk_token=specials[0]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return _trained(made, trainers.WordLevelTrainer, specials)


TIKTOKEN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS: Final[Mapping[str, Callable[[Sequence[str]], Any]]] = {
    "bytes": _bytes,
    "bytes, a space first": lambda specials: _bytes(specials, prefix=True),
    "tiktoken": lambda specials: _bytes(specials, TIKTOKEN),
    "digits": lambda specials: _bytes(specials, r"\p{N}|\s?[^\s\p{N}]+|\s+"),
    "always": _spaced("always"),
    "first": _spaced("first"),
    "never": _spaced("never"),
    "unigram": _spaced("always", models.Unigram, trainers.UnigramTrainer),
    "unigram first": _spaced("first", models.Unigram, trainers.UnigramTrainer),
    "llama": _llama(prepend=True),
    "gemma": _llama(prepend=False),
    "wordpiece": _wordpiece,
    "characters": _wordlevel,
}


@dataclass(frozen=True)
class Shape:
    """A model's way with texts."""

    name: str
    kind: str
    template: str | None
    eos: str
    bos: str | None = None
    more: tuple[str, ...] = ()
    """Other special tokens."""
    puts: str = "$A"
    """What the tokenizer puts a text between."""
    ends: tuple[str, ...] = ()
    """Ends that only the configuration of generation names."""
    closes: bool = True
    """False if the template ends no turn."""
    think: tuple[str, str] | None = None
    """The tags of thoughts."""
    opened: str = ""
    """What of a thought the template opens."""
    variables: tuple[tuple[str, Any], ...] = ()
    """For the template."""
    strips: bool = False
    """True if special tokens take the spaces behind them."""

    def tokenizer(self) -> Any:
        names: list[str] = ["<unk>", *([self.bos] if self.bos else []), self.eos, *self.more]
        specials = list(dict.fromkeys(names))
        made = KINDS[self.kind](specials)
        if self.strips:
            made.add_special_tokens([AddedToken(each, rstrip=True) for each in specials])
        made.post_processor = processors.TemplateProcessing(
            single=self.puts, special_tokens=[(name, made.token_to_id(name)) for name in specials]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="<unk>", bos_token=self.bos, eos_token=self.eos, pad_token=self.eos,
            chat_template=self.template, clean_up_tokenization_spaces=False,
        )  # fmt: skip

    def words(self, tokenizer: Any) -> Words:
        ids = [tokenizer.convert_tokens_to_ids(each) for each in self.ends]
        config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=[*ids, tokenizer.eos_token_id])
        generation = GenerationConfig(eos_token_id=config.eos_token_id) if ids else None
        return words(tokenizer, config, generation, dict(self.variables))


def _shown(text: str, content: str = "m.content") -> str:
    """A piece of a template, in which `%` is a message's content."""
    return "{{ " + f" + {content} + ".join(json.dumps(each, ensure_ascii=False) for each in text.split("%")) + " }}"


def turns(
    user: str, opens: str, said: str, *, after: str = "", head: str = "", system: str = "", more: str = ""
) -> str:
    """A template of one line for each role. `more`: what a prompt has after the opening of the assistant's turn."""
    learned = f"{_shown(opens)}{{% generation %}}{_shown(said)}{{% endgeneration %}}{_shown(after)}"
    other = f"{{% elif m.role == 'system' %}}{_shown(system)}" if system else ""
    roles = f"{{% if m.role == 'user' %}}{_shown(user)}{other}{{% else %}}{learned}{{% endif %}}"
    prompt = f"{{% if add_generation_prompt %}}{_shown(opens + more)}{{% endif %}}"
    return f"{head}{{% for m in messages %}}{roles}{{% endfor %}}{prompt}"


def _im(**options: str) -> str:
    system = "<|im_start|>system\n%<|im_end|>\n"
    user, opens = "<|im_start|>user\n%<|im_end|>\n", "<|im_start|>assistant\n"
    return turns(user, opens, "%<|im_end|>", after="\n", system=system, **options)


BOS: Final = "{{ bos_token }}"
IM: Final = ("<|im_start|>", "<|im_end|>")
TAGS: Final = ("<think>", "</think>")
CHATML: Final = _im()
DEFAULT_SYSTEM: Final = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + CHATML
)
QWEN3: Final = """{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set said = m.content %}{%- set thought = '' %}{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{- '<|im_start|>assistant\n' }}
{%- generation %}{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}{%- else %}{{- said }}{%- endif %}
{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"""
QWEN3_END: Final = "{%- endif %}"
NO_THINKING: Final = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
QWQ: Final = _im(more="<think>\n").replace("m.content +", "m.content.split('</think>')[-1].lstrip('\n') +")
LLAMA_2: Final = """{% for m in messages %}{% if m.role == 'user' %}\
{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""
GEMMA: Final = """{{ bos_token }}{% if messages[0].role == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}\
{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}\
{% if m.role == 'assistant' %}\
{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% else %}\
{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<start_of_turn>model\n' }}{% endif %}"""
USER, SAID, BEGIN, END = (
    "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
)  # fmt: skip


def _deepseek(closed: str, opened: str) -> str:
    said = f"{{{{ '{SAID}' }}}}{{% generation %}}{{{{ {closed} + m.content.split('</think>')[-1] + '{END}' }}}}"
    user = f"{{% if m.role == 'user' %}}{{{{ '{USER}' + m.content }}}}"
    prompt = f"{{% if add_generation_prompt %}}{{{{ '{SAID}' + {opened} }}}}{{% endif %}}"
    each = f"{user}{{% else %}}{said}{{% endgeneration %}}{{% endif %}}"
    return f"{BOS}{{% for m in messages %}}{each}{{% endfor %}}{prompt}"


R1: Final = _deepseek("''", "'<think>\n'")
V31: Final = _deepseek("'</think>'", "('<think>' if thinking is defined and thinking else '</think>')")
HARMONY: Final = """{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% for m in messages %}\
{% if m.role == 'assistant' %}\
{% if '<|channel|>' in m.content %}{{ raise_exception('no channels in the content') }}{% endif %}\
{{ '<|start|>assistant' }}\
{% generation %}{{ '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '') }}\
{% endgeneration %}\
{{ '' if loop.last else '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GLM_45: Final = """{{ '[gMASK]<sop>' }}{% set ns = namespace(last=-1) %}{% for m in messages %}\
{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}\
{{ '<|assistant|>' }}{% generation %}\
{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}\
{{ '\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>\n' }}\
{{ m.content.split('</think>')[-1].strip() }}{% endgeneration %}{% else %}{{ '<|' + m.role + '|>\n' + m.content }}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
HEADS: Final = turns(
    "<|start_header_id|>user<|end_header_id|>\n\n%<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "%<|eot_id|>", head=BOS, system="<|start_header_id|>system<|end_header_id|>\n\n%<|eot_id|>",
)  # fmt: skip
COHERE: Final = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
ENDOFTEXT: Final = "<|endoftext|>"
TULU: Final = turns("<|user|>\n%\n", "<|assistant|>\n", f"%{ENDOFTEXT}", after="\n")
ZEPHYR: Final = turns("<|user|>\n%</s>\n", "<|assistant|>\n", "%</s>", after="\n")
VICUNA: Final = turns("USER: % ", "ASSISTANT:", " %</s>", head="{{ bos_token + 'A chat. ' }}")

SHAPES: Final = (
    Shape("ChatML on a base", "bytes", CHATML, ENDOFTEXT, more=IM),
    Shape("ChatML", "bytes", CHATML, "<|im_end|>", more=(*IM, ENDOFTEXT)),
    Shape("ChatML, a space first", "bytes, a space first", CHATML, "<|im_end|>", more=IM),
    Shape("ChatML, always", "always", CHATML, "</s>", "<s>", IM, "<s> $A"),
    Shape("ChatML, first", "first", CHATML, "</s>", "<s>", IM, "<s> $A"),
    Shape("ChatML, never", "never", CHATML, "</s>", "<s>", IM, "<s> $A"),
    Shape("ChatML, an end put behind", "bytes", CHATML, ENDOFTEXT, more=IM, puts=f"$A {ENDOFTEXT}"),
    Shape("ChatML, put between", "always", BOS + CHATML, "</s>", "<s>", IM, "<s> $A </s>"),
    Shape("Qwen2.5", "tiktoken", DEFAULT_SYSTEM, "<|im_end|>", more=(*IM, ENDOFTEXT), ends=(ENDOFTEXT,)),
    Shape("Qwen3", "tiktoken", QWEN3 + NO_THINKING + QWEN3_END, "<|im_end|>", more=IM, think=TAGS),
    Shape(
        "Qwen3, no thoughts", "tiktoken", QWEN3 + NO_THINKING + QWEN3_END, "<|im_end|>", more=IM,
        variables=(("enable_thinking", False),),
    ),
    Shape("Qwen3, thinking", "tiktoken", QWEN3 + "{{- '<think>\n' }}" + QWEN3_END, "<|im_end|>", more=(*IM, *TAGS),
          think=TAGS, opened="<think>\n"),
    Shape("QwQ", "tiktoken", QWQ, "<|im_end|>", more=IM, think=TAGS, opened="<think>\n"),
    Shape("Thoughts kept", "bytes", _im(more="<think>\n"), "<|im_end|>", more=IM, think=TAGS, opened="<think>\n"),
    Shape("Llama 2", "llama", LLAMA_2, "</s>", "<s>", puts="<s> $A"),
    Shape("Llama 3", "tiktoken", HEADS, "<|eot_id|>", "<|begin_of_text|>",
          ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"), "<|begin_of_text|> $A",
          ("<|end_of_text|>",)),
    Shape("Llama 3 on a base", "tiktoken", HEADS, "<|end_of_text|>", "<|begin_of_text|>",
          ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin_of_text|> $A"),
    Shape("Mistral", "llama", turns("[INST] % [/INST]", "", " %</s>", head=BOS), "</s>", "<s>", puts="<s> $A"),
    Shape("Mistral with tokens", "always", turns("[INST] %[/INST]", "", " %</s>", head=BOS), "</s>", "<s>",
          ("[INST]", "[/INST]"), "<s> $A"),
    Shape("Mistral, Tekken", "tiktoken", turns("[INST]%[/INST]", "", "%</s>", head=BOS), "</s>", "<s>",
          ("[INST]", "[/INST]", "[THINK]", "[/THINK]"), "<s> $A", think=("[THINK]", "[/THINK]")),
    Shape("Gemma", "gemma", GEMMA, "<eos>", "<bos>", ("<start_of_turn>", "<end_of_turn>"), "<bos> $A"),
    Shape("Gemma, tuned", "gemma", GEMMA, "<end_of_turn>", "<bos>", ("<start_of_turn>", "<eos>"), "<bos> $A",
          ("<eos>",)),
    Shape("DeepSeek-V2", "digits", turns("User: %\n\n", "Assistant:", f" %{END}", head=BOS),
          END, BEGIN),
    Shape("DeepSeek-R1", "digits", R1, END, BEGIN, (USER, SAID),
          f"{BEGIN} $A", think=TAGS, opened="<think>\n"),
    Shape("DeepSeek-V3.1", "digits", V31, END, BEGIN,
          (USER, SAID, *TAGS)),
    Shape("DeepSeek-V3.1, thinking", "digits", V31, END, BEGIN,
          (USER, SAID, *TAGS), variables=(("thinking", True),), opened="<think>"),
    Shape("gpt-oss", "tiktoken", HARMONY, "<|return|>", "<|startoftext|>",
          ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", ENDOFTEXT), ends=(ENDOFTEXT, "<|call|>")),
    Shape("GLM-4", "tiktoken", turns("<|user|>\n%", "<|assistant|>", "\n%", head="{{ '[gMASK]<sop>' }}"), ENDOFTEXT,
          more=("<|user|>", "<|assistant|>", "[gMASK]", "<sop>"), closes=False),
    Shape("GLM-4.5", "tiktoken", GLM_45, ENDOFTEXT, more=("<|user|>", "<|assistant|>", "[gMASK]", "<sop>", *TAGS),
          closes=False, think=TAGS),
    Shape("Phi-3", "llama", turns("<|user|>\n%<|end|>\n", "<|assistant|>\n", "%<|end|>", after="\n"), ENDOFTEXT, "<s>",
          ("<|user|>", "<|assistant|>", "<|end|>"), ends=("<|end|>",)),
    Shape("Phi-3, spaces taken", "llama", turns("<|user|>\n%<|end|>\n", "<|assistant|>\n", "%<|end|>", after="\n"),
          ENDOFTEXT, "<s>", ("<|user|>", "<|assistant|>", "<|end|>"), strips=True),
    Shape("Phi-4-mini", "tiktoken", turns("<|user|>%<|end|>", "<|assistant|>", "%<|end|>")
          + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", ENDOFTEXT,
          more=("<|user|>", "<|assistant|>", "<|end|>")),
    Shape("Phi-4", "tiktoken", turns("<|im_start|>user<|im_sep|>%<|im_end|>", "<|im_start|>assistant<|im_sep|>",
          "%<|im_end|>"), ENDOFTEXT, more=(*IM, "<|im_sep|>")),
    Shape("Zephyr", "llama", ZEPHYR, "</s>", "<s>", puts="<s> $A"),
    Shape("Zephyr, first", "first", ZEPHYR, "</s>", "<s>", puts="<s> $A"),
    Shape("Tulu, OLMo", "bytes", TULU, ENDOFTEXT),
    Shape("Vicuna", "llama", VICUNA, "</s>", "<s>", puts="<s> $A"),
    Shape("Alpaca", "bytes", turns("### Instruction:\n%\n\n", "### Response:\n", "%", after="\n\n"), ENDOFTEXT,
          closes=False),
    Shape("Command R", "bytes", turns("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>%<|END_OF_TURN_TOKEN|>",
          "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "%<|END_OF_TURN_TOKEN|>", head=BOS), "<|END_OF_TURN_TOKEN|>",
          "<BOS_TOKEN>", COHERE),
    Shape("Command A", "bytes", turns("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>%<|END_OF_TURN_TOKEN|>",
          "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|START_RESPONSE|>%<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
          head=BOS), "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", (*COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    Shape("Baichuan", "always", turns("<reserved_106>%", "<reserved_107>", "%</s>"), "</s>", "<s>",
          ("<reserved_106>", "<reserved_107>")),
    Shape("EXAONE Deep", "bytes", turns("[|user|]%\n", "[|assistant|]", "%[|endofturn|]", after="\n",
          more="<thought>\n"), "[|endofturn|]", "[BOS]", ("[|user|]", "[|assistant|]"),
          think=("<thought>", "</thought>"),
          opened="<thought>\n"),
    Shape("Kimi K2", "tiktoken", turns("<|im_user|>user<|im_middle|>%<|im_end|>",
          "<|im_assistant|>assistant<|im_middle|>", "%<|im_end|>"), "[EOS]",
          more=("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")),
    Shape("Ling", "bytes", turns("<role>HUMAN</role>%", "<role>ASSISTANT</role>", "%<|role_end|>"), "<|role_end|>"),
    Shape("T5", "unigram", turns("user: % </s> ", "assistant: ", "% </s>"), "</s>", puts="$A </s>"),
    Shape("XLNet", "unigram first", CHATML, "</s>", "<s>", IM, "$A </s>"),
    Shape("BERT", "wordpiece", turns("[U] % [SEP] ", "[A] ", "% [SEP]"), "[SEP]", "[CLS]", ("[U]", "[A]"),
          "[CLS] $A [SEP]"),
    Shape("Characters", "characters", turns("%\n", "assistant\n", "%<|im_end|>"), "</s>", more=("<|im_end|>",)),
)  # fmt: skip
