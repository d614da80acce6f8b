"""The data of calls: `Batch` and its columns, `Ragged` token columns, `Metrics`, and a model's `Weights`.

Columns are numpy arrays without padding, with one value for each row or each token. A column on other ranks is a
`RemoteColumn`, which a batch splits, joins and loads like any other. Log-probs say what computed them (`Source`).

Weights travel from a policy to samplers by name, in buckets of shared memory. Each tensor has a fingerprint, so that a
sampler can prove what it has. `delta` sends only what changed.

An answer may be held to a `Constraint`; what was drawn under it is marked by its column `masked`. A reward that is
unknown is NaN (`with_rewards`).
"""

from meshrl.data.adapters import ADAPTER, BASE, DEFAULT_ADAPTER, adapters_of
from meshrl.data.batch import Batch
from meshrl.data.bucket import Bucket, Entry
from meshrl.data.columns import Column, check_lengths, private
from meshrl.data.constraints import (
    CONSTRAINT,
    MASKED,
    UNREPEATED,
    Branch,
    Constraint,
    Masks,
    Span,
    masked_spans,
    masked_text,
    read_constraint,
)
from meshrl.data.delta import WeightSource
from meshrl.data.images import (
    FINGERPRINTS,
    IMAGES,
    MOST_BYTES,
    Images,
    data_url,
    file_of,
    mark_of,
    name_of,
    names_in,
    opened,
    pieces_of,
    shown,
    thumbnail,
    unmarked,
)
from meshrl.data.loss_result import LossResult
from meshrl.data.messages import Message, Prompt, messages_in, prompt_in, prompt_text
from meshrl.data.metrics import Metrics
from meshrl.data.ragged import Origin, Ragged, Source, check_dtype, frozen, pickled, raw
from meshrl.data.remote_column import RemoteColumn, is_ragged
from meshrl.data.table import lengths
from meshrl.data.unknown import OUTCOMES, OnError, known_mean, unlearned, why_unknown, with_rewards
from meshrl.data.weights import AdapterOf, ArrivalLog, Probe, Weights

__all__ = [
    "ADAPTER",
    "BASE",
    "CONSTRAINT",
    "DEFAULT_ADAPTER",
    "FINGERPRINTS",
    "IMAGES",
    "MASKED",
    "MOST_BYTES",
    "OUTCOMES",
    "UNREPEATED",
    "AdapterOf",
    "ArrivalLog",
    "Batch",
    "Branch",
    "Bucket",
    "Column",
    "Constraint",
    "Entry",
    "Images",
    "LossResult",
    "Masks",
    "Message",
    "Metrics",
    "OnError",
    "Origin",
    "Probe",
    "Prompt",
    "Ragged",
    "RemoteColumn",
    "Source",
    "Span",
    "WeightSource",
    "Weights",
    "adapters_of",
    "check_dtype",
    "check_lengths",
    "data_url",
    "file_of",
    "frozen",
    "is_ragged",
    "known_mean",
    "lengths",
    "mark_of",
    "masked_spans",
    "masked_text",
    "messages_in",
    "name_of",
    "names_in",
    "opened",
    "pickled",
    "pieces_of",
    "private",
    "prompt_in",
    "prompt_text",
    "raw",
    "read_constraint",
    "shown",
    "thumbnail",
    "unlearned",
    "unmarked",
    "why_unknown",
    "with_rewards",
]
