"""The rewards of bench/grpo.py, one file for meshrl and for its peer: standard library only."""


def exact(prompt: str, completion: str, row: dict[str, object]) -> float:
    """Return 1 if the completion is the answer."""
    return float(completion.strip() == str(row["answer"]).strip())


def share(prompt: str, completion: str, row: dict[str, object]) -> float:
    """The share of the answer's characters that are in the right place. Further characters do not count."""
    answer = str(row["answer"])
    return sum(mine == wanted for mine, wanted in zip(completion, answer, strict=False)) / len(answer)
