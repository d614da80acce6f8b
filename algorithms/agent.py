"""GRPO over episodes of an agent: a program that talks to the model through an OpenAI-compatible server.

GRPO (arXiv:2402.03300) with episodes instead of completions. Each row is an episode. Its reward is what the program
returns, and its advantage compares the reward with those of its group. The policy trains on the episode's
conversations, with exactly the tokens that were sampled. With `credit = "turns"`, each answer of the model gets its own
advantage, from the rewards that the program gives to turns.

    meshrl run agent/quickstart
"""

from typing import Literal

import meshrl as rl

Credit = Literal["episode", "traces", "turns"]


class AgentConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    agent: rl.AgentConfig
    gateway: rl.GatewayConfig = rl.GatewayConfig()
    reference: rl.ReferenceConfig
    """The model that the KL penalty compares with. Used if `loss.kl` is above 0."""
    sampling: rl.GroupSampling = rl.GroupSampling()
    """How the model samples. `max_tokens` and `stop` apply to each answer. `n` is the number of episodes for a
    prompt."""
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2)
    credit: Credit = "episode"
    """`episode`: all answers get the episode's advantage. `traces`: each gets its trace's. `turns`: each gets that of
    the rewards from its turn on."""
    ahead: int = 0
    """Published weight versions that episodes may be behind. Above 0, episodes run while the policy trains."""
    prompts: int = 64
    """Prompts in a step. Each has `sampling.n` episodes."""
    steps: int = 400  # training steps


def credited(batch: rl.Batch, credit: Credit) -> rl.Batch:
    if credit == "turns":
        return batch.assign(advantages=rl.turn_advantages(batch.ragged("turn_rewards"), batch.groups))
    if credit == "traces":
        rewards, traces, seats = map(batch.ragged, ("trace_rewards", "turn_traces", "turn_seats"))
        return batch.assign(advantages=rl.trace_advantages(rewards, traces, batch.groups, seats))
    return batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))


async def agent(run: rl.Run, config: AgentConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None
    gateway = rl.Gateway(sampler, rl.read_chat(config.sampler, config.policy), config.gateway)
    agents = rl.Agents(sampler, rl.Agent(config.agent, run.folder / "agents"), gateway)

    await rl.publish(policy, agents)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        agents.serving(),
        rl.held_out(run, agents, task.held_out, config),
        rl.rollouts(agents, prompts, config.sampling, ahead=config.ahead) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)  # each row is an episode
            rows = rl.conversations(credited(batch, config.credit))  # each row is a conversation
            metrics = rl.Metrics({})
            if len(rows):  # none if no program asked the model, for example because its tool was down
                if config.loss.anchor == "trainer":
                    rows = await policy.logprobs(rows)
                if reference:
                    rows = await reference.logprobs(rows)
                metrics = await policy.update(rows, config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
