"""Where rows come from and what judges them: tasks, reward functions, and environments.

`Task.load` reads a source once. `Task.batches` yields training prompts forever, and in a resumed run skips those that
were used before its checkpoint. Pairs and steps for supervised algorithms are made from a task's rows here too.

Reward functions are the shipped ones and the user's own, with a sandbox for code. An exception of user code is reported
in its row, and affects only that row. Environments take turns with a model, and their episodes look like the rows of a
sampler. The backend `function` has roles that call Python functions: a reward, or a step of an environment.
"""

from meshrl.tasks import harness, verifiers
from meshrl.tasks.builtin import exact_match, finite, math_answer, numeric_answer, overlong_penalty, reasoning_format
from meshrl.tasks.cells import accepted, fill
from meshrl.tasks.cursor import (
    APART,
    CursorState,
    DataCursor,
    PromptEvent,
    Ranges,
    StepAccount,
    as_ranges,
    data_cursor,
    in_ranges,
)
from meshrl.tasks.environment import Environment, EnvironmentConfig, load_environment
from meshrl.tasks.episodes import Episodes
from meshrl.tasks.function import (
    RewardConfig,
    RewardFunction,
    awaited,
    from_trl,
    gathered,
    is_own,
    load_function,
    try_reward,
)
from meshrl.tasks.images import decoded_url
from meshrl.tasks.sandbox import code_tests
from meshrl.tasks.sandboxes import (
    Ran,
    Sandbox,
    check_awaits,
    check_command,
    check_sandbox,
    open_sandbox,
    takes_sandbox,
)
from meshrl.tasks.sources import Row, TaskConfig, numbered_rows, read_rows
from meshrl.tasks.supervised import (
    answer_pairs,
    labelled,
    labelled_steps,
    learned_answers,
    least_margins,
    mismatched,
    rejected_answers,
)
from meshrl.tasks.task import Task, counted, filled_rows, first_row, load_quietly, prompts_of
from meshrl.tasks.user_process import UserCode, has_processes

MODELS = "none"
ROLES = {
    "Environment": "meshrl.tasks.environment:FunctionEnvironment",
    "Reward": "meshrl.tasks.function:FunctionReward",
}
"""The roles of the backend `function`, for the registry."""

__all__ = [
    "APART",
    "MODELS",
    "ROLES",
    "CursorState",
    "DataCursor",
    "Environment",
    "EnvironmentConfig",
    "Episodes",
    "PromptEvent",
    "Ran",
    "Ranges",
    "RewardConfig",
    "RewardFunction",
    "Row",
    "Sandbox",
    "StepAccount",
    "Task",
    "TaskConfig",
    "UserCode",
    "accepted",
    "answer_pairs",
    "as_ranges",
    "awaited",
    "check_awaits",
    "check_command",
    "check_sandbox",
    "code_tests",
    "counted",
    "data_cursor",
    "decoded_url",
    "exact_match",
    "fill",
    "filled_rows",
    "finite",
    "first_row",
    "from_trl",
    "gathered",
    "harness",
    "has_processes",
    "in_ranges",
    "is_own",
    "labelled",
    "labelled_steps",
    "learned_answers",
    "least_margins",
    "load_environment",
    "load_function",
    "load_quietly",
    "math_answer",
    "mismatched",
    "numbered_rows",
    "numeric_answer",
    "open_sandbox",
    "overlong_penalty",
    "prompts_of",
    "read_rows",
    "reasoning_format",
    "rejected_answers",
    "takes_sandbox",
    "try_reward",
    "verifiers",
]
