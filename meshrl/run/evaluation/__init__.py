"""Evaluation of a model: exact match and pass@k on held-out prompts, during training and after it."""

from meshrl.run.evaluation.judge import BesideSampling, evaluate, evaluate_during, held_out
from meshrl.run.evaluation.offline import Question, evaluate_run

__all__ = [
    "BesideSampling",
    "Question",
    "evaluate",
    "evaluate_during",
    "evaluate_run",
    "held_out",
]
