"""Roles: the endpoints of policies, critics, references, samplers and rewards. Backends override them with plain types.

The standard columns of a batch are listed in `data.Batch`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from meshrl.algo import Gae, Loss
from meshrl.data import Batch, LossResult, Metrics, Weights
from meshrl.errors import BackendError, ConfigError, DataError
from meshrl.mesh import EVERY, Actor, Gather, Mean, Same, Shard, endpoint
from meshrl.roles.config import LoraConfig, Sampling, Step


class Stateful(Actor, ABC):
    """An actor whose state changes during a run, and is kept in checkpoints."""

    @endpoint
    @abstractmethod
    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the actor's whole state into a separate folder, which is created if needed.

        Each rank receives the same folder and writes its share. The caller makes sure that a half-written folder is
        never read. With `wait = False` the call returns once the state is copied, and `written` waits for the rest.
        The run fingerprints each file, except large ones that have `Sums` next to them.
        """

    @endpoint
    async def written(self) -> None:
        """Wait until the last checkpoint is written. Raises the error if writing failed."""

    @endpoint
    @abstractmethod
    async def restore(self, folder: str) -> None:
        """Load the state that `checkpoint` wrote, so that later calls return the same bits as after the checkpoint.

        Settings that are not part of the state, such as the learning rate, come from the current configuration. Raises
        an error and changes nothing if the folder belongs to another role or model. Raises Damaged if a file differs
        from its `Sums`.
        """


class Policy(Stateful, ABC):
    """The language model that is trained."""

    @endpoint
    @abstractmethod
    async def encode(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `tokens` and `loss_mask` from the texts `prompt` and `completion`. EOS is appended to the completion.

        Rows with `messages`, lists of `{"role": ..., "content": ...}`, are dialogues in the model's chat template. The
        assistant's turns are learned: all of them, or only the last one if the row's `learn` is "last".
        """

    @endpoint
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """Make one optimizer step: `forward_backward`, then `step`. The loss is normalised over the global batch.

        A backend whose calls may run between these two overrides it.
        """
        await self.forward_backward(batch, loss)
        return await self.step()

    @endpoint
    @abstractmethod
    async def forward_backward(self, batch: Shard[Batch], loss: Loss) -> Gather[LossResult]:
        """Add the gradients of a batch, which `step` applies.

            for part in parts:
                await policy.forward_backward(part, loss)
            metrics = await policy.step()

        The loss is normalised over all rows since the last step: several calls are one call with the rows of all.
        Until the step, `logprobs`, `weights` and `save` are of the weights before it, and `checkpoint` is refused.

        Raises DataError if `update` would, or if the loss's `normalise` or `constant` differs from that of an earlier
        call since the last step: nothing changes. If the call fails or is cancelled after its first pass, all gradients
        since the last step are dropped, and the error says so. A rank that dies loses them too.
        """

    @endpoint
    @abstractmethod
    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Mean[Metrics]:
        """Make one optimizer step with all gradients since the last one, and drop them.

        `adapter`: step over the adapter of this name alone. Default: that of rows that name none, or the whole model.
        `optimizer` replaces values of the policy's table in this step. Returns what `update` returns for all these rows
        together. DataError if there are no gradients. ModelError if the gradient is not finite: it is dropped, and no
        step is made.
        """

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `logprobs`, ragged float32: the log-probability of each token under this model."""

    @endpoint
    @abstractmethod
    async def weights(self, adapter: str | None = None) -> Gather[Weights, EVERY]:
        """Return the current weights, to which each rank contributes a part. Their version is the number of steps.

        `adapter`: the weights of the adapter of this name, as its `sync` says: alone, or merged into the model.
        """

    @endpoint
    @abstractmethod
    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer), completely or not at all.

        Adapters are written like peft's: named ones into folders of their names inside. `adapter`: only this one, into
        the folder itself.
        """

    @endpoint
    @abstractmethod
    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Write the whole state, as every `Stateful` does, or that of one adapter.

        Adapters in a state of the whole are there with their tables, and `restore` adds those that are missing.
        """

    @endpoint
    @abstractmethod
    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Load what `checkpoint` wrote. The state of one adapter may become that of one with another name.

        Without `optimizer`, only the weights are loaded, and the optimizer begins without moments.

        Raises ModelError, and changes nothing, if the state is of another model, or of adapters with another rank or
        other targets.
        """

    @endpoint
    async def add_adapter(self, name: str, lora: LoraConfig) -> None:
        """Add an adapter on the frozen base, without any effect yet, with a separate optimizer and schedule.

        Rows name it in their text column `adapter`, and several adapters may take part in a call. ConfigError if the
        name is taken, a target is no layer, the policy trains its base too, or the backend has no adapters.
        """
        raise ConfigError(f"{type(self).__name__} has no adapters: its backend implements none")

    @endpoint
    async def drop_adapter(self, name: str) -> None:
        """Drop an adapter with its optimizer and the gradients that wait for a step. ConfigError if there is none."""
        raise ConfigError(f"{type(self).__name__} has no adapter {name!r}")

    @endpoint
    async def adapters(self) -> Same[dict[str, int]]:
        """Return the number of steps of each adapter by name, those of `lora` as "default". Empty without adapters."""
        return {}


class Reference(Actor, ABC):
    """A frozen language model."""

    @endpoint
    @abstractmethod
    async def logprobs(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `reference_logprobs`, ragged float32."""

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> None:
        """Load the whole weights of a policy of any backend and layout, and freeze them.

            await reference.load(await policy.weights())

        Raises ModelError and loads nothing if the weights belong to another model or dtype, or were damaged in transit.
        Checkpoints do not contain references: a resumed run must load the weights again.
        """


class Critic(Stateful, ABC):
    """A model that predicts the return at each token."""

    @endpoint
    @abstractmethod
    async def advantages(self, batch: Shard[Batch], gae: Gae) -> Gather[Batch]:
        """Add `values`, `advantages` and `returns`, ragged float32, from `rewards` and this model's values.

        Entry t of `values` belongs to the state that token t was sampled from. `gae` defines the other columns, and
        `with_advantages` adds them. If `gae.kl` is above 0, `logprobs` and `reference_logprobs` are read too. All are
        zero where `loss_mask` is False.
        """

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """Make one optimizer step on the whole batch. The loss receives values instead of a policy's log-probs."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write the model and its value head, completely or not at all."""


class Sampler(Actor, ABC):
    """The language model that generates completions."""

    @endpoint
    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter that `load` added. DataError if there is none, or rows are still decoded with it."""
        raise DataError(f"{type(self).__name__} has no adapter {name!r}")

    @endpoint
    @abstractmethod
    def generate(self, prompts: Shard[Batch], sampling: Sampling) -> AsyncIterator[Gather[Batch]]:
        """Generate completions, and yield finished rows, some at a time.

        Reads `prompt` (text). Each prompt gives `sampling.n` rows with all its columns, and adds `tokens`, `loss_mask`,
        `sampler_logprobs`, `versions`, `oldest_version` (int32, of the completion's tokens), `completion`,
        `temperature`, `truncated` and `aborted`. Rows that already have `tokens`, `loss_mask`, `sampler_logprobs` and
        `versions`, such as aborted ones, continue after these tokens. `max_tokens` counts the whole completion. A row
        whose completion has ended is yielded unchanged.

        Such rows may have `observation`, text or None. Its tokens are inserted before the new ones and are not part of
        the completion. If `loss_mask` is False throughout, the completion begins after them. A row without room for the
        observation and one more token is yielded unchanged and `truncated`. Other rows generate as many tokens as fit.

        `sampler_logprobs` are those of the whole distribution at the row's temperature (1 if greedy), as for a policy.
        `top_p` and `top_k` restrict only which tokens are sampled.

        With `sampling.beside`, other calls sample and replay as if this call did not exist, and aborts do not end it.
        """

    @endpoint
    async def logprobs(self, batch: Shard[Batch], top: int = 0) -> Gather[Batch]:
        """Add `logprobs`, ragged float32: the log-probability of each token of `tokens` under the current weights.

        Each is given the tokens before it, at temperature 1, and that of a row's first token is 0. With `targets`,
        ragged int32, they are those of other tokens at the same places. With `top`, adds `top_tokens`, ragged int32
        [tokens, top], the most probable tokens at each place, and `top_logprobs`, ragged float32 [tokens, top].

        Raises BackendError if the backend cannot, and DataError for rows that the model cannot read.
        """
        raise BackendError(
            f"{type(self).__name__} does not tell the log-probs of given tokens: take a sampler of the backend torch"
        )

    @endpoint
    @abstractmethod
    async def load(self, weights: Weights) -> Gather[Batch]:
        """Load new weights between two decode steps. Later tokens carry their version.

        Returns where the load happened, as int64 columns: `rank`, `load` (the number of earlier loads and aborts on the
        rank), `call` (the number of a call of `generate` on the rank) and `steps` (the number of steps that the call
        had made). There is one row for each call that was decoding, and one with -1 steps for the next call. Rows of
        aborts since the last load come first.

        Weights of one adapter are added under its name, or replace the earlier ones of that name. Rows that name it in
        the text column `adapter` use them from their next token on. A version under a separate name
        (`Weights.named`) stays for the rows that name it.

        If the weights have a probe, a sampler with a model adds `difference`, float64: the mean distance of its
        log-probs from the policy's. A sampler that measures it adds `pause`, float64: the seconds in which it sampled
        nothing. Raises ModelError, and samples no token from the new weights, if the distance is too large or a tensor
        was damaged in transit.
        """

    @endpoint
    @abstractmethod
    async def replay(self, record: Batch) -> None:
        """Repeat loads and aborts at the places of an earlier run. `record`: the results of its loads, in order.

        The run must make the same calls, at any time. A call of `generate` waits at the place of a load, and a load
        waits until the calls have reached their places. Call this first. After the last load, the run is free. A load
        raises DataError if the record does not fit.
        """

    @endpoint
    @abstractmethod
    async def abort(self) -> None:
        """End the running calls of `generate`. They yield their unfinished rows as `aborted`, and nothing more.

        Such a row has its tokens so far, and is not `truncated`. A row that had not begun has its prompt's tokens, and
        the `oldest_version` of the call's last step.
        """


class ResumingSampler(Sampler, ABC):
    """A sampler whose calls of `generate` outlast an `abort`: their rows wait, and continue after the next `load`.

    A sampler that wraps one is a ResumingSampler too, so that a stream does not wait for its calls to end.
    """

    @endpoint
    @abstractmethod
    async def resume(self) -> None:
        """Continue the rows that `abort` stopped, with the current weights, because no others will be loaded."""


class Reward(Actor, ABC):
    """The role that scores completions."""

    @endpoint
    @abstractmethod
    async def score(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `rewards`, float32, and `reward_error`, the text of the exception if scoring failed, else None."""


class RewardModel(Stateful, Reward):
    """A reward that is trained: a language model with a head that gives each token a score, a number.

    `score` returns the score at the last token of each text.
    """

    @endpoint
    @abstractmethod
    async def encode(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `tokens` and `loss_mask`, which marks the tokens whose scores are learned.

        For texts `prompt` and `completion`, this is the last token of the row, which `score` uses too. Rows with
        `steps`, a list of texts, have these in sequence instead of a completion. They are learned at the last token of
        each step. For the last step, this is the end of the row.
        """

    @endpoint
    @abstractmethod
    async def token_scores(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `token_scores`, ragged float32: the score of each token where `loss_mask` is True, 0 elsewhere."""

    @endpoint
    @abstractmethod
    async def update(self, batch: Shard[Batch], loss: Loss) -> Mean[Metrics]:
        """Make one optimizer step on the whole batch. The loss receives scores instead of a policy's log-probs."""

    @endpoint
    @abstractmethod
    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier with one label, completely or not at all.

        `Reward` and transformers' AutoModelForSequenceClassification can read it. Both return the same score as
        `score`.
        """
