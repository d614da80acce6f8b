"""GRPO whose step begins before its batch is whole: gradients are added group by group, as completions finish.

The trainer does not wait for the last completion of a batch, and one step is made for all. It computes the update of
`grpo` with `epochs = 1`, except for rounding. The sampler needs its own ranks (docs/overlap.md).

    meshrl run streamed_grpo/quickstart
"""

import numpy as np

import meshrl as rl


class StreamedGrpoConfig(rl.RolloutConfig):
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2)
    parts: int = 4  # most parts of a batch. Each is trained on as soon as it is scored
    sampling: rl.GroupSampling = rl.GroupSampling()


async def streamed_grpo(run: rl.Run, config: StreamedGrpoConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for _ in run.steps(config.steps):
            parts: list[rl.Batch] = []
            async for scored in stream.parts(config.parts):
                part = await scored.load("rewards", "groups", "loss_mask")
                learns = np.any(part.loss_mask.values)  # else no reward of the part is known
                part = part.assign(advantages=rl.group_advantages(part.rewards, part.groups))
                if config.loss.anchor == "trainer":
                    part = await policy.logprobs(part)
                if reference:
                    part = await reference.logprobs(part)
                if learns:
                    await policy.forward_backward(part, config.loss)
                parts.append(part)
            metrics = await policy.step()
            await rl.publish(policy, stream)
            await run.record(metrics, rl.Batch.concat(parts))
    await policy.save(str(run.folder / "model"))
