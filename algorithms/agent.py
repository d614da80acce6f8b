"""GRPO over episodes of an agent: a program that talks to the model through an OpenAI-compatible server.

GRPO (arXiv:2402.03300) with whole episodes for completions: a row is an episode, its reward is what the program
returns, its advantage is how much better that is than its group's. What is trained on are the conversations that the
episode held, token for token as they were sampled. With `credit = "turns"` each answer of the model has an advantage
of its own, by the rewards that the program gives turns.

    meshrl run agent/quickstart
"""

from typing import Literal

import meshrl as rl

Credit = Literal["episode", "turns"]


class AgentConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    agent: rl.AgentConfig
    gateway: rl.GatewayConfig = rl.GatewayConfig()
    reference: rl.ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: rl.GroupSampling = rl.GroupSampling()
    """`max_tokens` and `stop` are of an answer; `n` are a prompt's episodes."""
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2)
    credit: Credit = "episode"
    """Whether all of an episode's answers have its advantage, or each that of the rewards from its turn on."""
    ahead: int = 0
    """How many publications of weights the episodes may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` episodes."""
    steps: int = 400


def credited(batch: rl.Batch, credit: Credit) -> rl.Batch:
    if credit == "turns":
        return batch.assign(advantages=rl.turn_advantages(batch.ragged("turn_rewards"), batch.groups))
    return batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))


async def agent(run: rl.Run, config: AgentConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None
    gateway = rl.Gateway(sampler, rl.read_chat(config.sampler), config.gateway)
    agents = rl.Agents(sampler, rl.Agent(config.agent, run.folder / "agents"), gateway)

    await rl.publish(policy, agents)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        agents.serving(),
        rl.held_out(run, agents, task.held_out, config),
        rl.rollouts(agents, prompts, config.sampling, ahead=config.ahead) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)  # a row an episode
            rows = rl.conversations(credited(batch, config.credit))  # a row a conversation
            metrics = rl.Metrics({})
            if len(rows):  # or no program asked the model, as where a tool of theirs is down
                if config.loss.anchor == "trainer":
                    rows = await policy.logprobs(rows)
                if reference:
                    rows = await reference.logprobs(rows)
                metrics = await policy.update(rows, config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
