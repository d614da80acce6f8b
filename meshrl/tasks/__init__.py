"""Tasks turn datasets into prompts: sources, templates, held-out prompts, and which prompts a run has used.

`Task.load` reads a source once. `Task.batches` yields training prompts forever, and in a resumed run skips those that
were used before its checkpoint. Pairs and steps for supervised algorithms are made from a task's rows here too.
"""

from meshrl.tasks import verifiers
from meshrl.tasks.account import Happening, Ranges, StepAccount, as_ranges, in_ranges
from meshrl.tasks.config import MessageTemplate, TaskConfig
from meshrl.tasks.cursor import APART, CursorState, DataCursor, data_cursor
from meshrl.tasks.lengths import counted
from meshrl.tasks.pairs import answer_pairs, corrupted, labelled, mismatched, rejected_answers
from meshrl.tasks.sources import Row, numbered_rows, read_rows
from meshrl.tasks.steps import labelled_steps, least_margins
from meshrl.tasks.task import Task, dialogue, fill, fill_answer, fill_prompt, first_row, load_quietly

__all__ = [
    "APART",
    "CursorState",
    "DataCursor",
    "Happening",
    "MessageTemplate",
    "Ranges",
    "Row",
    "StepAccount",
    "Task",
    "TaskConfig",
    "answer_pairs",
    "as_ranges",
    "corrupted",
    "counted",
    "data_cursor",
    "dialogue",
    "fill",
    "fill_answer",
    "fill_prompt",
    "first_row",
    "in_ranges",
    "labelled",
    "labelled_steps",
    "least_margins",
    "load_quietly",
    "mismatched",
    "numbered_rows",
    "read_rows",
    "rejected_answers",
    "verifiers",
]
