"""The reward of bench/grpo.py, the same file for meshrl and for its peer: standard library only."""


def reward(prompt: str, completion: str, row: dict[str, object]) -> float:
    """The share of the answer's characters that stand where they should; 1 if nothing is wrong or left over."""
    answer = str(row["answer"])
    right = sum(mine == wanted for mine, wanted in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
