"""A run of a script: its roles, its steps, its checkpoints, and its files.

`Run` spawns roles by name on the meshes of its table, and counts steps. The recorder writes numbers, samples and
events. A killed run resumes from a checkpoint. `check` finds mistakes before a model loads, `audit_run` checks a run's
guarantees, and `serve` passes a trained model to a server.
"""

from meshrl.run.artifacts import merge_adapters, push, serve
from meshrl.run.audit import Audit, Verdict, audit_run
from meshrl.run.background_eval import BackgroundEvaluations, Measurement
from meshrl.run.check import examine, find_doubts, find_mistakes, list_of_mistakes
from meshrl.run.check_rows import unchecked_rows
from meshrl.run.checkpoints import newest_checkpoint
from meshrl.run.config import AlgorithmConfig, EvaluationConfig, MeshConfig, RolloutConfig, RunConfig, tables_of
from meshrl.run.evaluation import (
    BesideSampling,
    EvalOptions,
    Evaluation,
    evaluate,
    evaluate_during,
    evaluate_run,
    held_out,
)
from meshrl.run.fork import plan_fork
from meshrl.run.jobs import Job, description_of, find_config, is_shipped, load_job, make_job, pin, shipped_configs
from meshrl.run.memory import MemoryOptions, MemoryPlan, RankMemory, RoleMemory, plan_memory, savings_of
from meshrl.run.named_task import evaluate_task, recipe, recipe_text
from meshrl.run.run import Run, Steps
from meshrl.run.scaffold import copy_script
from meshrl.run.session_audit import SessionAudit, audit_session, is_session
from meshrl.run.train import is_machine_fault, run_job, train

__all__ = [
    "AlgorithmConfig",
    "Audit",
    "BackgroundEvaluations",
    "BesideSampling",
    "EvalOptions",
    "Evaluation",
    "EvaluationConfig",
    "Job",
    "Measurement",
    "MemoryOptions",
    "MemoryPlan",
    "MeshConfig",
    "RankMemory",
    "RoleMemory",
    "RolloutConfig",
    "Run",
    "RunConfig",
    "SessionAudit",
    "Steps",
    "Verdict",
    "audit_run",
    "audit_session",
    "copy_script",
    "description_of",
    "evaluate",
    "evaluate_during",
    "evaluate_run",
    "evaluate_task",
    "examine",
    "find_config",
    "find_doubts",
    "find_mistakes",
    "held_out",
    "is_machine_fault",
    "is_session",
    "is_shipped",
    "list_of_mistakes",
    "load_job",
    "make_job",
    "merge_adapters",
    "newest_checkpoint",
    "pin",
    "plan_fork",
    "plan_memory",
    "push",
    "recipe",
    "recipe_text",
    "run_job",
    "savings_of",
    "serve",
    "shipped_configs",
    "tables_of",
    "train",
    "unchecked_rows",
]
