"""The data of calls: `Batch` and its columns, `Ragged` token columns, and `Metrics`.

Columns are numpy arrays without padding, with one value for each row or each token. A column on other ranks is a
`RemoteColumn`, which a batch splits, joins and loads like any other. Log-probs say what computed them (`Source`).
"""

from meshrl.data.batch import Batch
from meshrl.data.column_ops import lengths
from meshrl.data.columns import Column, check_lengths, private
from meshrl.data.metrics import Metrics
from meshrl.data.provenance import Origin, Source
from meshrl.data.ragged import Ragged, check_dtype, from_raw, frozen, pickled, raw
from meshrl.data.remote_column import RemoteColumn, is_ragged

__all__ = [
    "Batch",
    "Column",
    "Metrics",
    "Origin",
    "Ragged",
    "RemoteColumn",
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
