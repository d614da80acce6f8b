"""A server of OpenEnv, whose environment asks for a number: `python open_guess.py PORT`."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Told(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        return Told(text="1 to 9?")

    def step(self, action, timeout_s=None, **_):
        return Told(
            text="less" if action.number > 3 else "yes", done=action.number == 3, reward=float(action.number == 3)
        )

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Told, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
