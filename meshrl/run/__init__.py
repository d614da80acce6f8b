"""A run of a script: its roles, its steps, its checkpoints, and its files.

`Run` spawns roles by name on the meshes of its table, and counts steps. The recorder writes numbers, samples and
events. A killed run resumes from a checkpoint. `check` finds mistakes before a model loads, `audit_run` checks a run's
guarantees, and `serve` passes a trained model to a server.
"""

from meshrl.run.algorithm_config import AlgorithmConfig, EvaluationConfig, RolloutConfig
from meshrl.run.artifacts import merge_adapters, newest_model
from meshrl.run.audit import Audit, audit_run
from meshrl.run.audit_promises import Verdict
from meshrl.run.check import Findings, examine, find_doubts, find_mistakes
from meshrl.run.check_rows import unseen
from meshrl.run.checkpoints import newest_checkpoint
from meshrl.run.config import MeshConfig, RunConfig
from meshrl.run.disk import write_whole
from meshrl.run.fork import Fork, plan_fork
from meshrl.run.jobs import Job, about, find_config, is_shipped, load_job, root_of, shipped_configs
from meshrl.run.memory import Asked, Held, MemoryPlan, RankMemory, plan_memory, savings_of
from meshrl.run.mistakes import list_of_mistakes
from meshrl.run.new import copy_script
from meshrl.run.periodic import BackgroundMeasurements, Measurement
from meshrl.run.pins import pin
from meshrl.run.push import push
from meshrl.run.restarts import run_job
from meshrl.run.run import Run, Steps
from meshrl.run.serving import serve
from meshrl.run.tables import tables_of
from meshrl.run.train import Trained, train

__all__ = [
    "AlgorithmConfig",
    "Asked",
    "Audit",
    "BackgroundMeasurements",
    "EvaluationConfig",
    "Findings",
    "Fork",
    "Held",
    "Job",
    "Measurement",
    "MemoryPlan",
    "MeshConfig",
    "RankMemory",
    "RolloutConfig",
    "Run",
    "RunConfig",
    "Steps",
    "Trained",
    "Verdict",
    "about",
    "audit_run",
    "copy_script",
    "examine",
    "find_config",
    "find_doubts",
    "find_mistakes",
    "is_shipped",
    "list_of_mistakes",
    "load_job",
    "merge_adapters",
    "newest_checkpoint",
    "newest_model",
    "pin",
    "plan_fork",
    "plan_memory",
    "push",
    "root_of",
    "run_job",
    "savings_of",
    "serve",
    "shipped_configs",
    "tables_of",
    "train",
    "unseen",
    "write_whole",
]
