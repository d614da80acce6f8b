"""An environment of two seats that the policy plays both: a solver, which learns, and a judge, which does not."""

import verifiers.v1 as vf

__all__ = ["SeatsEnv", "SeatsTaskset"]


class SeatsData(vf.TaskData):
    answer: str


class SeatsTaskset(vf.Taskset[vf.Task[SeatsData], vf.TasksetConfig]):
    def load(self):
        yield vf.Task(SeatsData(prompt="2+2", system_prompt="Digits only.", answer="4"), self.config.task)


class SeatsConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    judge: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SeatsEnv(vf.Env[SeatsConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        solved = await agents.solver.run(task)
        await agents.judge.run(task.with_data(prompt=f"Is {solved.last_reply} right?", system_prompt=None))

    async def finalize(self, task, episode):
        solver, judge = episode.traces
        solver.record_reward("judged", float(judge.last_reply))


if __name__ == "__main__":
    raise SystemExit("there is no server here")
