"""Where rows come from and what judges them: tasks, reward functions, and environments.

`Task.load` reads a source once. `Task.batches` yields training prompts forever, and in a resumed run skips those that
were used before its checkpoint. Pairs and steps for supervised algorithms are made from a task's rows here too.

Reward functions are the shipped ones and the user's own, with a sandbox for code. An exception of user code is reported
in its row, and affects only that row. Environments take turns with a model, and their episodes look like the rows of a
sampler. The backend `function` has roles that call Python functions: a reward, or a step of an environment.
"""

from meshrl.tasks import harness as harness, verifiers as verifiers
from meshrl.tasks.builtin import (
    exact_match as exact_match,
    finite as finite,
    math_answer as math_answer,
    numeric_answer as numeric_answer,
    overlong_penalty as overlong_penalty,
    reasoning_format as reasoning_format,
)
from meshrl.tasks.cells import accepted as accepted, fill as fill
from meshrl.tasks.cursor import (
    APART as APART,
    CursorState as CursorState,
    DataCursor as DataCursor,
    PromptEvent as PromptEvent,
    Ranges as Ranges,
    StepAccount as StepAccount,
    as_ranges as as_ranges,
    data_cursor as data_cursor,
    in_ranges as in_ranges,
)
from meshrl.tasks.environment import (
    Environment as Environment,
    EnvironmentConfig as EnvironmentConfig,
    load_environment as load_environment,
)
from meshrl.tasks.episodes import Episodes as Episodes
from meshrl.tasks.function import (
    RewardConfig as RewardConfig,
    RewardFunction as RewardFunction,
    awaited as awaited,
    from_trl as from_trl,
    gathered as gathered,
    is_own as is_own,
    load_function as load_function,
    try_reward as try_reward,
)
from meshrl.tasks.images import decoded_url as decoded_url
from meshrl.tasks.sandbox import code_tests as code_tests
from meshrl.tasks.sandboxes import (
    Ran as Ran,
    Sandbox as Sandbox,
    check_awaits as check_awaits,
    check_command as check_command,
    check_sandbox as check_sandbox,
    open_sandbox as open_sandbox,
    takes_sandbox as takes_sandbox,
)
from meshrl.tasks.sources import (
    Row as Row,
    TaskConfig as TaskConfig,
    numbered_rows as numbered_rows,
    read_rows as read_rows,
)
from meshrl.tasks.supervised import (
    answer_pairs as answer_pairs,
    labelled as labelled,
    labelled_steps as labelled_steps,
    learned_answers as learned_answers,
    least_margins as least_margins,
    mismatched as mismatched,
    rejected_answers as rejected_answers,
)
from meshrl.tasks.task import (
    Task as Task,
    counted as counted,
    filled_rows as filled_rows,
    first_row as first_row,
    load_quietly as load_quietly,
    prompts_of as prompts_of,
)
from meshrl.tasks.user_process import UserCode as UserCode, has_processes as has_processes

MODELS = "none"
ROLES = {
    "Environment": "meshrl.tasks.environment:FunctionEnvironment",
    "Reward": "meshrl.tasks.function:FunctionReward",
}
"""The roles of the backend `function`, for the registry."""
