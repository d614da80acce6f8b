"""A first update of your own model, from a script.

    python examples/library.py MODEL_FOLDER

MODEL_FOLDER has a model and its tokenizer, as transformers writes them. The updated model goes to runs/first/model.
Needs `pip install 'meshrl[torch]'`.
"""

import asyncio
import sys
from collections.abc import Mapping

import meshrl as rl


def digits(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """The reward: the share of the completion's characters that are digits."""
    return sum(each.isdigit() for each in completion) / max(len(completion), 1)


if __name__ == "__main__":
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(100)]
    settings = {"run.name": "first", "steps": 1, "prompts": 8, "sampling.n": 4, "sampling.max_tokens": 8}
    trained = asyncio.run(rl.train(sys.argv[1], rows, digits, settings))
    print(f"the updated model is in {trained.model}")
