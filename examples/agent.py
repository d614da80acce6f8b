"""An agent that learns: a program that calls the model through an OpenAI client, uses a tool and corrects itself.

    python examples/agent.py

`solve` is the agent. Rollouts overlap training, each conversation is a row, and the policy trains on exactly the tokens
that were sampled. A scripted sampler replaces the model, so the example takes a second. `run.spawn(rl.Sampler, ...)`
gives a real sampler (docs/agents.md). Needs `pip install 'meshrl[agents]'`.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from openai import AsyncOpenAI

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Agents, Gateway, conversations
from meshrl.testing import FakePolicy, ScriptedChat, ScriptedSampler

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def solve(client: AsyncOpenAI, row: Mapping[str, object]) -> float:
    """Let the model call `add` until it answers. Returns 1 for the right answer, and half as much for each retry."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    reward = 1.0
    for _ in range(4):
        told = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = told.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert call.type == "function"
            result = sum(json.loads(call.function.arguments)["numbers"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        if not message.tool_calls:
            if message.content == row["answer"]:
                return reward
            reward /= 2
            messages.append({"role": "user", "content": "That is wrong. Use the tool."})
    return 0.0


def scripted(prompt: str) -> str:
    """Replace a model: it knows one sum, guesses the other, and calls the tool when the user asks for it."""
    if "tool: 5" in prompt or "1 + 4?" in prompt:
        return "5"
    return (
        '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>' if "Use the tool" in prompt else "6"
    )


async def main() -> None:
    """Train a fake policy on episodes of the agent."""
    policy, sampler = FakePolicy(rl.PolicyConfig(model="none")), ScriptedSampler(scripted)
    agents = Agents(sampler, Agent(AgentConfig(source=f"{__file__}:solve")), Gateway(sampler, ScriptedChat()))
    tasks = [rl.Batch.of(prompt=["2 + 3?", "1 + 4?"], answer=["5", "5"], groups=np.arange(2) + 2 * n) for n in range(3)]
    await rl.publish(policy, agents)
    async with rl.rollouts(agents, iter(tasks), rl.Sampling(n=2, max_tokens=200), ahead=1) as stream:
        async for batch in stream:  # each row is an episode
            advantages = rl.group_advantages(batch.rewards, batch.groups)
            rows = conversations(batch.assign(advantages=advantages))  # each row is a conversation
            await policy.update(rows, rl.ClippedLoss(clip=0.2))
            await rl.publish(policy, stream)
            print(f"rewards {batch.rewards.tolist()}, {int(rows.loss_mask.values.sum())} tokens learned")


if __name__ == "__main__":
    asyncio.run(main())
