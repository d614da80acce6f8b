"""The data of calls: `Batch` and its columns, `Ragged` token columns, `Metrics`, and a model's `Weights`.

Columns are numpy arrays without padding, with one value for each row or each token. A column on other ranks is a
`RemoteColumn`, which a batch splits, joins and loads like any other. Log-probs say what computed them (`Source`).

Weights travel from a policy to samplers by name, in buckets of shared memory. Each tensor has a fingerprint, so that a
sampler can prove what it has. `delta` sends only what changed.

An answer may be held to a `Constraint`; what was drawn under it is marked by its column `masked`. A reward that is
unknown is NaN (`with_rewards`).
"""

from meshrl.data.adapters import (
    ADAPTER as ADAPTER,
    BASE as BASE,
    DEFAULT_ADAPTER as DEFAULT_ADAPTER,
    adapters_of as adapters_of,
)
from meshrl.data.batch import Batch as Batch
from meshrl.data.bucket import Bucket as Bucket, Entry as Entry
from meshrl.data.columns import Column as Column, check_lengths as check_lengths, private as private
from meshrl.data.constraints import (
    CONSTRAINT as CONSTRAINT,
    MASKED as MASKED,
    UNREPEATED as UNREPEATED,
    Branch as Branch,
    Constraint as Constraint,
    Masks as Masks,
    Span as Span,
    masked_spans as masked_spans,
    masked_text as masked_text,
    read_constraint as read_constraint,
)
from meshrl.data.delta import WeightSource as WeightSource
from meshrl.data.images import (
    FINGERPRINTS as FINGERPRINTS,
    IMAGES as IMAGES,
    MOST_BYTES as MOST_BYTES,
    Images as Images,
    data_url as data_url,
    file_of as file_of,
    mark_of as mark_of,
    name_of as name_of,
    names_in as names_in,
    opened as opened,
    pieces_of as pieces_of,
    shown as shown,
    thumbnail as thumbnail,
    unmarked as unmarked,
)
from meshrl.data.loss_result import LossResult as LossResult
from meshrl.data.messages import (
    Message as Message,
    Prompt as Prompt,
    messages_in as messages_in,
    prompt_in as prompt_in,
    prompt_text as prompt_text,
)
from meshrl.data.metrics import Metrics as Metrics
from meshrl.data.ragged import (
    Origin as Origin,
    Ragged as Ragged,
    Source as Source,
    check_dtype as check_dtype,
    frozen as frozen,
    pickled as pickled,
    raw as raw,
)
from meshrl.data.remote_column import RemoteColumn as RemoteColumn, is_ragged as is_ragged
from meshrl.data.table import lengths as lengths
from meshrl.data.unknown import (
    OUTCOMES as OUTCOMES,
    OnError as OnError,
    known_mean as known_mean,
    unlearned as unlearned,
    why_unknown as why_unknown,
    with_rewards as with_rewards,
)
from meshrl.data.weights import AdapterOf as AdapterOf, ArrivalLog as ArrivalLog, Probe as Probe, Weights as Weights
