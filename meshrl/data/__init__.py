"""TODO-room."""

from meshrl.data.batch import Batch
from meshrl.data.column_ops import lengths
from meshrl.data.columns import Column, check_lengths, private
from meshrl.data.metrics import Metrics
from meshrl.data.provenance import Role, Source
from meshrl.data.ragged import Ragged, check_dtype, from_raw, frozen, pickled, raw
from meshrl.data.remote_column import Remote, is_ragged

__all__ = [
    "Batch",
    "Column",
    "Metrics",
    "Ragged",
    "Remote",
    "Role",
    "Source",
    "check_dtype",
    "check_lengths",
    "from_raw",
    "frozen",
    "is_ragged",
    "lengths",
    "pickled",
    "private",
    "raw",
]
