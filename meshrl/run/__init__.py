"""A run of a script: its roles, its steps, its checkpoints, and its files.

`Run` spawns roles by name on the meshes of its table, and counts steps. The recorder writes numbers, samples and
events. A killed run resumes from a checkpoint. `check` finds mistakes before a model loads, `audit_run` checks a run's
guarantees, and `serve` passes a trained model to a server.
"""

from meshrl.run.artifacts import merge_adapters as merge_adapters, push as push, serve as serve
from meshrl.run.audit import Audit as Audit, Verdict as Verdict, audit_run as audit_run
from meshrl.run.background_eval import BackgroundEvaluations as BackgroundEvaluations, Measurement as Measurement
from meshrl.run.check import (
    examine as examine,
    find_doubts as find_doubts,
    find_mistakes as find_mistakes,
    list_of_mistakes as list_of_mistakes,
)
from meshrl.run.check_rows import unchecked_rows as unchecked_rows
from meshrl.run.checkpoints import newest_checkpoint as newest_checkpoint
from meshrl.run.config import (
    AlgorithmConfig as AlgorithmConfig,
    EvaluationConfig as EvaluationConfig,
    MeshConfig as MeshConfig,
    RolloutConfig as RolloutConfig,
    RunConfig as RunConfig,
    tables_of as tables_of,
)
from meshrl.run.evaluation import (
    BesideSampling as BesideSampling,
    EvalOptions as EvalOptions,
    Evaluation as Evaluation,
    evaluate as evaluate,
    evaluate_during as evaluate_during,
    evaluate_run as evaluate_run,
    held_out as held_out,
)
from meshrl.run.fork import plan_fork as plan_fork
from meshrl.run.jobs import (
    Job as Job,
    description_of as description_of,
    find_config as find_config,
    is_shipped as is_shipped,
    load_job as load_job,
    make_job as make_job,
    pin as pin,
    shipped_configs as shipped_configs,
)
from meshrl.run.memory import (
    MemoryOptions as MemoryOptions,
    MemoryPlan as MemoryPlan,
    RankMemory as RankMemory,
    RoleMemory as RoleMemory,
    plan_memory as plan_memory,
    savings_of as savings_of,
)
from meshrl.run.named_task import evaluate_task as evaluate_task, recipe as recipe, recipe_text as recipe_text
from meshrl.run.run import Run as Run, Steps as Steps
from meshrl.run.scaffold import copy_script as copy_script
from meshrl.run.session_audit import (
    SessionAudit as SessionAudit,
    audit_session as audit_session,
    is_session as is_session,
)
from meshrl.run.train import is_machine_fault as is_machine_fault, run_job as run_job, train as train
