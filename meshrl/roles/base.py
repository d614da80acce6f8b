"""Roles: what an algorithm may ask of a policy, a critic, a reference, a sampler and a reward.

A role is the contract; a backend (`meshrl_torch`, ...) overrides its methods with plain types.
The standard columns of a batch are listed in `data.Batch`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl.mesh import EVERY, Actor, Gather, Mean, Shard, endpoint
from meshrl.objectives import Gae
from meshrl.roles.sampling import Sampling
from meshrl.weights import Weights


class Stateful(Actor, ABC):
    """What a run's checkpoints keep: an actor that changes while the run goes on."""

    @endpoint
    @abstractmethod
    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write all that is needed to go on from here into a folder of this actor's own, made where it is not there.

        Each rank is given the same folder and writes what the role decides. Who calls sees to it that what is half
        written is never read. With `wait = False` it returns when the state is copied: `written` waits for the rest.
        """

    @endpoint
    async def written(self) -> None:
        """Wait until the last checkpoint is written. Raises what went wrong there."""

    @endpoint
    @abstractmethod
    async def restore(self, folder: str) -> None:
        """Take what `checkpoint` wrote there: each call gives, to the bit, what it would have given then.

        Of the configuration only what is no part of the state counts, such as the learning rate. An error, and
        nothing changed, where the folder is of another role or model.
        """


class Policy(Stateful, ABC):
    """A language model that is trained."""

    @endpoint
    @abstractmethod
    async def encode(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `tokens` and `loss_mask` from the texts `prompt` and `completion` (which ends with EOS).

        Rows with `messages`, lists of `{"role": ..., "content": ...}`, are dialogues in the model's own chat template,
        of which the assistant's turns are learned: all, or the last where the row's `learn` is "last".
        """

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """One optimizer step on the whole batch. The loss is normalised over the global batch."""

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `logprobs`, ragged float32: this model's log-probability of each token."""

    @endpoint
    @abstractmethod
    async def weights(self) -> Gather[Weights, EVERY]:
        """The current weights, of which each rank has made a part; their version is the number of updates so far."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer), whole or not at all."""


class Reference(Actor, ABC):
    """A frozen language model."""

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `reference_logprobs`, ragged float32."""

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> None:
        """Take a policy's whole weights, whatever backend and layout made them: it is frozen anew, as they are.

            await reference.load(await policy.weights())

        ModelError, and nothing taken, where they are of another model or dtype, or did not arrive as they were sent.
        Checkpoints keep nothing of a reference: a run that goes on loads them again.
        """


class Critic(Stateful, ABC):
    """A model that predicts the return from each token."""

    @endpoint
    @abstractmethod
    async def advantages(self, batch: Shard[Batch], gae: Gae) -> Gather[Batch]:
        """Add `values`, `advantages` and `returns`, ragged float32, from `rewards` and this model's values.

        Entry t of `values` is of the state that token t was drawn from; `advantages.gae` defines the others, and
        `critic.with_advantages` adds them. With `gae.kl` above 0 also from `logprobs` and `reference_logprobs`. Zero
        where `loss_mask` is False.
        """

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """One optimizer step on the whole batch: the loss is given the values where a policy's has log-probs."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write the model and its value head, whole or not at all."""


class Sampler(Actor, ABC):
    """A language model that generates."""

    @endpoint
    @abstractmethod
    def generate(self, prompts: Shard[Batch], sampling: Sampling) -> AsyncIterator[Gather[Batch]]:
        """Finished rollouts, some rows at a time, as they finish.

        Needs `prompt` (text). Each row gives `sampling.n` rows with all of its columns and `tokens`, `loss_mask`,
        `sampler_logprobs`, `versions`, `oldest_version` (int32, of the completion's tokens), `completion`,
        `temperature`, `truncated` and `aborted`. Rows that have `tokens`, `loss_mask`, `sampler_logprobs` and
        `versions` already, as aborted ones do, go on after them: `max_tokens` counts the whole completion, and one that
        has ended is yielded as it is.

        Such rows may have `observation`, text or None, whose tokens come first and are no part of the completion, which
        begins after them where `loss_mask` is False throughout. One with no room for it and a token more is yielded as
        it is, `truncated`; others draw as many as there is room for.

        `sampler_logprobs` are of the whole distribution at the row's temperature (1 for greedy), as a policy's: `top_p`
        and `top_k` restrict what is drawn alone.

        With `sampling.beside` other calls draw and replay the same as without this one, and no abort ends it.
        """

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> Gather[Batch]:
        """Take new weights between two decode steps; tokens from then on carry their version.

        Returns where that was, int64 columns: `rank`, `load` (how many loads and aborts came to the rank before),
        `call` (the number of a call of `generate` on the rank) and `steps` (that it had made): a row for each call that
        was decoding, and one, with -1 steps, for the call that was the next to begin. Before them stand the rows of the
        aborts since the last load.

        Where the weights have a probe, a sampler that holds a model adds `difference`, float64: how far its log-probs
        are, on average, from the policy's; one that knows it adds `pause`, float64: the seconds in which it drew
        nothing. ModelError where they are too far, or a tensor is not as it was sent: then
        no token is drawn from what did arrive.
        """

    @endpoint
    @abstractmethod
    async def replay(self, record: Batch) -> None:
        """Let loads and aborts come where they came in an earlier run: `record` is what its loads returned, in order.

        Needs the same calls, at whatever moments: one of `generate` waits at the place of a load, and a load for the
        calls to be there. To be called before any other; after the last load the run is free. DataError, of the load,
        where the record does not fit.
        """

    @endpoint
    @abstractmethod
    async def abort(self) -> None:
        """End the running calls of `generate`: they yield what they have not finished, `aborted`, and no more.

        Such a row has the tokens so far, and `truncated` is False; one that had not begun has its prompt's tokens, and
        as its `oldest_version` that of the call's last step.
        """


class ResumingSampler(Sampler, ABC):
    """A sampler whose calls of `generate` last: what `abort` stops goes on in them, with the next `load`."""


class Reward(Actor, ABC):
    """What judges a completion."""

    @endpoint
    @abstractmethod
    async def score(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `rewards`, float32, and `reward_error`, the text of what the judge raised, or None."""


class RewardModel(Stateful, Reward):
    """A reward that learns: a language model's body with a head that gives a score at any token, a number.

    `score` gives each text the score at its last token.
    """

    @endpoint
    @abstractmethod
    async def encode(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `tokens` and `loss_mask`, which says at which tokens scores are learned.

        Of the texts `prompt` and `completion` it is the last token of the row, where `score` judges it. Rows with
        `steps`, a list of texts each, have these one after the other in place of a completion, and are learned at the
        last token of each step; of the last step that is where the row ends.
        """

    @endpoint
    @abstractmethod
    async def token_scores(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `token_scores`, ragged float32: the score at each token where `loss_mask` is True, 0 at the others."""

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """One optimizer step on the whole batch: the loss is given the scores where a policy's has log-probs."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier with one label, whole or not at all.

        `Reward` reads it, and transformers' AutoModelForSequenceClassification does; both give the score of `score`.
        """
