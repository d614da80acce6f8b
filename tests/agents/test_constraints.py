"""Answers of a real model that are held to a schema, a call, an expression or choices, and what is learned of them."""

import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, check_constraint, conversations, read_chat
from meshrl.agents.protocol import Asked
from meshrl.data import Branch, Constraint, masked_spans
from meshrl.errors import BackendError, DataError
from meshrl.roles import implementation
from meshrl_megatron.roles import MegatronPolicy, MegatronReference
from meshrl_torch.model.chat import HuggingFaceChat, words_of
from meshrl_torch.model.loading import load
from meshrl_torch.model.masks import plain_lark
from meshrl_torch.sample.sampler import TorchSampler
from tests.agents.test_formats import FAMILIES, chat_of
from tests.real_rows.shapes import Shape

TEMPLATE = """
{%- for each in messages -%}
{{- each.role + ':' + (each.content or '') -}}
{%- for call in each.tool_calls or [] -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' -}}
{{- '\n</tool_call>' -}}
{%- endfor -%}
{{- '|' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SIZES = {"hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 800}
MODEL = rl.NewModel.model_validate({"characters": CHARACTERS, "chat_template": TEMPLATE, **SIZES})
POLICY, SAMPLER = rl.PolicyConfig(model=MODEL), rl.SamplerConfig(model=MODEL)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "mul")]


def held(*branches: Branch, thought: str = "") -> str:
    return Constraint(branches, thought).text


async def drawn(*constraints: str | None, **sampling: Any) -> rl.Batch:
    prompts = rl.Batch.of(prompt=["Say: "] * len(constraints), constraint=list(constraints))
    return await rl.rollout(TorchSampler(SAMPLER), prompts, rl.Sampling.model_validate({"max_tokens": 200, **sampling}))


async def test_answers_are_what_their_constraints_say() -> None:
    call = Branch(SCHEMA, begin='<tool_call>\n{"name": "add", "arguments": ', end="}\n</tool_call>")
    constraints = [
        held(Branch(SCHEMA)),
        held(Branch(regex=r"[a-c]{2}\d/\d+z"), thought="</think>"),
        held(Branch(choices=("yes", "no", 'a "b"'))),
        held(call, Branch(choices=("none",)), Branch({}, begin="any ")),
        None,
    ]
    rows = await drawn(*constraints, n=6, max_tokens=100)
    said = [str(text) for text in rows.objects("completion")]
    texts = [said[6 * number : 6 * number + 6] for number in range(len(constraints))]
    ended = np.logical_not(rows.row("truncated")).reshape(5, 6)
    for text in np.array(texts[0])[ended[0]]:
        read = json.loads(text)
        assert read.keys() == {"a", "b"}
        assert 0 <= read["a"] <= 99
        assert read["b"] in ("x", "y")
    assert ended[0].any()
    assert all(
        re.fullmatch(r"(?s:.*?)</think>[ \n]{0,4}[a-c]{2}\d/\d+z", text) for text in np.array(texts[1])[ended[1]]
    )
    assert {*texts[2]} <= {"yes", "no", 'a "b"'}
    assert len({*texts[2]}) > 1
    assert ended[2].all()
    for text in np.array(texts[3])[ended[3]]:
        if text.startswith("any "):
            json.loads(text[4:])
        else:
            assert text == "none" or json.loads(text[len("<tool_call>") : -len("</tool_call>")])["name"] == "add"
    assert any(text.startswith("any ") for text in texts[3])
    assert [spans is None for spans in rows.objects("masked")] == [False] * 24 + [True] * 6


async def test_an_answer_that_nothing_can_continue_ends_alone_and_can_be_learned() -> None:
    """Two expressions that llguidance begins and then gives up, beside an answer that has none."""
    endless = held(Branch(regex="((a|b|ab|ba){1,1000}){900}"))
    hollow = held(Branch(regex="[ab]é"))  # no token has the last character
    rows = await drawn(endless, hollow, None, endless, max_tokens=300)
    learned = np.array([int(np.sum(mask)) for mask in rows.loss_mask])
    assert rows.row("truncated")[[0, 1, 3]].tolist() == [True] * 3
    assert learned[1] == 1
    assert all(20 < learned[row] < 300 for row in (0, 3))
    assert set(str(rows.objects("completion")[0])) <= set("ab")
    alone = await drawn(None, None, None, max_tokens=300)
    assert learned[2] == np.sum(alone.loss_mask[2])
    told = (await implementation(rl.Policy, "torch")(POLICY).logprobs(rows)).ragged("logprobs").values
    mask = np.asarray(rows.loss_mask.values, np.bool_)
    assert told[mask] == pytest.approx(rows.sampler_logprobs.values[mask], abs=1e-4)


async def test_log_probs_are_those_under_the_mask_in_the_sampler_and_the_policy(tmp_path: Path) -> None:
    """By hand: the letters that go on with a choice, and after a whole choice the end. Logits by transformers alone."""
    choices, temperature = ("ab", "abc", "b", "cd"), 0.7
    rows = await drawn(held(Branch(choices=choices)), None, n=6, temperature=temperature, max_tokens=8)
    policy = implementation(rl.Policy, "torch")(POLICY)
    told = (await policy.logprobs(rows)).ragged("logprobs")
    await policy.save(str(tmp_path))
    network = AutoModelForCausalLM.from_pretrained(tmp_path).double()
    letters = ["", "", *CHARACTERS]
    for row in range(12):
        tokens, learned = rows.tokens[row].tolist(), np.flatnonzero(rows.loss_mask[row]).tolist()
        logits = network(input_ids=torch.tensor([tokens])).logits[0].detach().numpy() / temperature
        said = ""
        for place in learned:
            going = {letters.index(each[len(said)]) for each in choices if each.startswith(said) and each != said}
            allowed = sorted(going | ({1} if said in choices else set())) if row < 6 else list(range(len(letters)))
            expected = logits[place - 1][tokens[place]] - np.log(np.exp(logits[place - 1][allowed]).sum())
            assert rows.sampler_logprobs[row][place] == pytest.approx(expected, abs=1e-4)
            assert told[row][place] == pytest.approx(expected, abs=1e-4)
            said += letters[tokens[place]]
    metrics = await policy.update(rows.assign(advantages=np.linspace(-1, 1, 12, dtype=np.float32)), rl.ClippedLoss())
    assert abs(metrics["ratio"] - 1) < 1e-4


ASKS = """
async def solve(client, row):
    user = {"role": "user", "content": "Say"}
    said = await client.chat.completions.create(model="policy", messages=[user], **row["first"])
    message = said.choices[0].message
    messages = [user, {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls}, user]
    await client.chat.completions.create(model="policy", messages=messages, **row["second"])
    return {"reward": 1.0, "turns": [float(bool(message.tool_calls)), 0.0]}
"""


async def test_an_agent_that_requires_a_call_and_then_a_format_and_what_is_learned_of_it(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS, "utf-8")
    sampler = TorchSampler(SAMPLER)
    agent = Agent(AgentConfig(source=f"{tmp_path / 'asks.py'}:solve"))
    agents = Agents(sampler, agent, Gateway(sampler, read_chat(SAMPLER, POLICY)))
    named = {"type": "function", "function": {"name": "mul"}}
    fields = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    row = {
        "first": {"tools": TOOLS, "tool_choice": named},
        "second": {"response_format": fields, "tools": TOOLS},
    }
    prompts = rl.Batch.of(prompt=["?"], row=[row])
    batch = await rl.rollout(agents, prompts, rl.Sampling(n=4, max_tokens=300))
    assert batch.objects("reward_error") == (None,) * 4
    rows = conversations(batch)
    assert '"name": "mul", "arguments": ' in str(rows.objects("completion")[0])
    assert [len(spans) for spans in masked_spans(rows)] == [2] * 4
    told = (await implementation(rl.Policy, "torch")(POLICY).logprobs(rows)).ragged("logprobs").values
    learned = np.asarray(rows.loss_mask.values, np.bool_)
    assert told[learned] == pytest.approx(rows.sampler_logprobs.values[learned], abs=1e-4)


def test_what_cannot_be_constrained_or_learned_is_refused_by_name() -> None:
    constraint = Constraint((Branch(SCHEMA),))
    for sampler, policy, why in (
        ("sglang", None, "the backend 'sglang' cannot"),
        ("vllm", "torch", "the backend 'vllm' masks by rules of its own"),
        ("torch", "megatron", "the policy's backend 'megatron'"),
    ):
        table = SAMPLER.model_copy(update={"backend": sampler})
        chat = read_chat(table, POLICY.model_copy(update={"backend": policy}) if policy else None)
        with pytest.raises(DataError, match=why):
            check_constraint(chat, constraint)
    with pytest.raises(DataError, match="no token of the model can continue"):
        check_constraint(read_chat(SAMPLER), Constraint((Branch(regex="é"),)))
    spoken = read_chat(SAMPLER.model_copy(update={"backend": "vllm"}))
    special = load(SAMPLER).tokenizer.eos_token
    with pytest.raises(DataError, match="special token of this model"):
        check_constraint(spoken, Constraint((Branch(SCHEMA, begin=str(special)),)))
    with pytest.raises(DataError, match="whose tokens are the characters"):
        check_constraint(spoken, constraint)
    serving = read_chat(SAMPLER.model_copy(update={"backend": "http"}))
    check_constraint(serving, constraint)
    with pytest.raises(DataError, match="without calls of tools"):
        check_constraint(serving, Constraint((Branch(SCHEMA),), thought="</think>"))
    with pytest.raises(DataError, match="cannot be held to"):
        check_constraint(serving, Constraint((Branch({"type": "triangle"}),)))


async def test_rows_whose_masks_cannot_be_repeated_are_refused() -> None:
    rows = await drawn(held(Branch(choices=("ab",))))
    policy = implementation(rl.Policy, "torch")(POLICY)
    (span,) = masked_spans(rows)[0]
    for masked, why in (
        (json.dumps([[*span[:2], ""]]), "under a mask of its own"),
        (json.dumps([[*span[:2], held(Branch(choices=("cd",)))]]), "which its constraint does not allow"),
        ("{}", "has no spans"),
    ):
        with pytest.raises(DataError, match=why):
            await policy.logprobs(rows.assign(masked=[masked]))
    with pytest.raises(DataError, match="'megatron' computes log-probs without their masks"):
        MegatronPolicy.check_rows(load(SAMPLER), rows)
    with pytest.raises(DataError, match=r'use reference[.]backend = "fsdp"'):
        MegatronReference.check_rows(load(SAMPLER), rows)
    for sampling, constraint, why in (
        ({"ignore_eos": True}, held(Branch(regex="a")), "ends where that says"),
        ({}, '{"branches": [{}]}', "without one of schema, regex, choices"),
        ({}, held(Branch(regex="é")), "no token of the model can continue"),
    ):
        with pytest.raises(Exception, match=why):
            await drawn(constraint, **sampling)


def test_a_call_that_cannot_be_held_to_a_form_is_refused() -> None:
    def asked(family: str, tool: Any) -> None:
        chat, _ = chat_of(next(each for each in FAMILIES if each.name == family))
        Asked([], None, [{"function": tool}], called=[tool["name"]]).constraint(chat, "")

    plain = Shape("plain", "bytes", "{% for m in messages %}{{ m.content }}{% endfor %}", "</s>")
    silent = HuggingFaceChat(plain.words(tokenizer := plain.tokenizer()))
    for _ in range(2):  # the template is asked once
        with pytest.raises(DataError, match="template writes a call of a tool in no form"):
            Asked([], None, TOOLS, form=Branch({})).constraint(silent, "")
        tokenizer.chat_template = TEMPLATE
    assert Asked([], None, TOOLS).constraint(silent, "") is None
    with pytest.raises(DataError, match="which cannot be read: take names of letters"):
        asked("Kimi-K2", {"name": "two words"})
    for long in ({"name": "f" * 257}, {"name": "f", "parameters": {"properties": {"a" * 257: {}}}}):
        with pytest.raises(DataError, match="257 characters, more than 256"):
            asked("GLM-4.6", long)
    for parameters, why in (
        ({"oneOf": []}, "one by one between tags.*oneOf"),
        ({"required": ["a"]}, "required parameters"),
        ({"properties": {"<a": {}}}, "which cannot be read"),
        (
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            "without quotes, as a text that cannot be held to pattern",
        ),
    ):
        with pytest.raises(DataError, match=why):
            asked("GLM-4.6", {"name": "f", "parameters": parameters})
        asked("Hermes", {"name": "f", "parameters": parameters})


def branch_of(family: str, parameters: Any) -> Branch:
    chat, _ = chat_of(next(each for each in FAMILIES if each.name == family))
    asked = Asked([], None, [{"function": {"name": "f", "parameters": parameters}}], called=["f"])
    constraint = asked.constraint(chat, "")
    assert constraint is not None
    chat.check(constraint)
    return constraint.branches[0]


@pytest.mark.parametrize("family", ["Hermes", "GLM-4.6"])
def test_a_schema_that_is_none_is_refused_with_its_tool_and_field(family: str) -> None:
    for parameters, field in (
        ({"properties": 5}, "properties"),
        ({"properties": ["a"]}, "properties"),
        ({"properties": {"a": 5}}, "properties"),
        ({"required": 5}, "required"),
        ({"required": True}, "required"),
        ({"required": [{}]}, "required"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "enum": 5}, {"type": "null"}]}}}, "enum"),
    ):
        with pytest.raises(DataError, match=f"'f' are no JSON schema: `{field}`"):
            branch_of(family, parameters)


def test_parameters_between_tags_may_have_keys_that_hold_nothing() -> None:
    notes = {"title": "a", "readOnly": True, "x-own": 1, "$id": "a", "examples": [], "$comment": "", "default": "b"}
    text = {"type": "string", "description": "a", "minimum": 1, **notes}
    parts = branch_of("GLM-4.6", {"type": ["object"], "properties": {"a": text}, **notes}).parts
    assert parts
    assert [bool(part.without) for part in parts] == [True]
    refused: list[dict[str, Any]] = [{"enum": []}, {"enum": [1]}, {"const": 1}]
    for only in refused:
        with pytest.raises(DataError, match="the parameter 'a' of 'f' is a text, and its `enum` or `const` has none"):
            branch_of("GLM-4.6", {"properties": {"a": {"type": "string", **only}}})


def test_only_a_schema_an_expression_and_choices_are_plain() -> None:
    for branch in (Branch({}), Branch(regex="a"), Branch(choices=("a",))):
        assert Constraint((branch,)).is_plain
    serving = read_chat(SAMPLER.model_copy(update={"backend": "http"}))
    for branch in (Branch(without="a"), Branch(without=""), Branch(parts=(Branch({}),)), Branch({}, begin="a")):
        assert not Constraint((branch,)).is_plain
        with pytest.raises(DataError, match="without calls of tools"):
            check_constraint(serving, Constraint((branch,)))


def test_an_engine_follows_nothing_with_a_tokenizer_that_llguidance_cannot_read() -> None:
    slow = replace(words_of(SAMPLER), tokenizer=PreTrainedTokenizerBase())
    with pytest.raises(BackendError, match="is not a fast tokenizer"):
        plain_lark(slow, Constraint((Branch(SCHEMA),)))
