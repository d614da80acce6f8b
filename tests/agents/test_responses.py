"""`/v1/responses`, by the real client: the same conversation in another form."""

from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from meshrl import Sampling
from meshrl.agents import Gateway, Session
from meshrl.testing import ScriptedChat, ScriptedSampler, simulate

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def talk(script: Any, program: Callable[[openai.AsyncOpenAI, Gateway, Session], Any]) -> None:
    """A program against a script, in virtual time."""

    async def main() -> None:
        gateway = Gateway(ScriptedSampler(script), ScriptedChat())
        session = gateway.open(Sampling(max_tokens=1000))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
        async with openai.AsyncOpenAI(
            base_url=session.url, api_key=session.token, max_retries=0, http_client=http
        ) as client:
            await program(client, gateway, session)

    simulate(main)


def test_a_text_and_instructions() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        told = await client.responses.create(model="any", instructions="be kind", input="hello")
        assert (told.output_text, told.status) == ("hi", "completed")
        assert told.usage is not None
        assert told.usage.output_tokens == len("hi\0")
        short = await client.responses.create(model="any", input="hello", max_output_tokens=2)
        assert (short.output_text, short.status) == ("lo", "incomplete")
        rows = gateway.close(session)
        assert rows.objects("prompt") == ("system: be kind\nuser: hello\nassistant: ", "user: hello\nassistant: ")

    talk(["hi", "long"], program)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("before", ["I add", ""])
def test_calls_of_tools_go_on_in_one_row(before: str, streamed: bool) -> None:
    async def asked(client: openai.AsyncOpenAI, given: Any) -> Any:
        if not streamed:
            return await client.responses.create(model="any", input=given, tools=[TOOL])
        async with client.responses.stream(model="any", input=given, tools=[TOOL]) as stream:
            return await stream.get_final_response()

    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}]
        told = await asked(client, given)
        assert told.output_text == before
        given += told.output
        (call,) = [item for item in told.output if item.type == "function_call"]
        assert (call.name, call.arguments) == ("add", '{"a": 1}')
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        assert (await asked(client, given)).output_text == "two"
        rows = gateway.close(session)
        assert len(rows) == 1
        assert int(rows.loss_mask[0].sum()) == len(f"{before}{CALL}\0two\0")

    talk([before + CALL, "two"], program)


def test_a_conversation_goes_on_in_either_form() -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        user: Any = {"role": "user", "content": "hello"}
        told = await client.responses.create(model="any", input="hello")
        history: Any = [user, {"role": "assistant", "content": told.output_text}, user]
        assert (await client.chat.completions.create(model="any", messages=history)).choices[0].message.content == "two"
        assert len(gateway.close(session)) == 1

    talk(["one", "two"], program)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"previous_response_id": "resp_1"}, "give the whole conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "type 'input_image'"),
        ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "an item of type 'reasoning'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not served"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": []}, "there are no messages"),
    ],
)
def test_requests_that_are_refused_in_words(given: Any, why: str) -> None:
    async def program(client: openai.AsyncOpenAI, gateway: Gateway, session: Session) -> None:
        asked: dict[str, Any] = {"model": "any", "input": "hello", **given}
        with pytest.raises(openai.BadRequestError, match=why):
            await client.responses.create(**asked)

    talk([], program)
