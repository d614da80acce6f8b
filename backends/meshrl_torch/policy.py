"""The policy of the torch backend: packed training of a whole model on one rank."""

from torch import Tensor

from meshrl.data import Batch, Metrics, Source
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.roles import Policy, PolicyConfig
from meshrl.weights import Weights, WeightSource
from meshrl_hf import checkpoint, training
from meshrl_hf.encoding import encoded
from meshrl_hf.loading import load
from meshrl_hf.lora import adapt, published, trained
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.packing import MicroBatch
from meshrl_hf.probe import probe
from meshrl_hf.scoring import check_readable, logprobs, one_by_one, predicted
from meshrl_hf.state import TrainingState
from meshrl_hf.transfer import arrays
from meshrl_torch.one_rank import OneRankTraining


class TorchPolicy(OneRankTraining, Policy):
    """A model in float32 (or bfloat16, its optimizer too), trained by AdamW."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config.mesh)
        self._config = config
        self._model = load(config)
        adapt(self._model, config.lora, config.seed)
        if config.activation_checkpointing:
            self._model.network.activation_checkpointing_enable({"use_reentrant": False})
            self._model.network.train(True)  # what transformers asks for; its dropout is zero
        self._trained = trained(self._model)
        self._optimizer = Optimizer(config.optimizer, list(self._trained.values()))
        self._sender = WeightSource(changes=config.delta_sync)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn, the loss is a critic's, or log-probs come from elsewhere than it says or
        from later weights; ModelError if the gradient is not finite.
        """

        def check() -> None:
            check_predicts(loss, "logprobs")
            check_sources(batch, loss, self._optimizer.steps)
            check_readable(self._model, batch)

        async with self._updating:  # one at a time: gradients are gathered in the parameters
            budget = self._config.micro_batch_tokens
            return await training.step(self._optimizer, self._predicted, batch, loss, budget, check)

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return predicted(self._model, batch, micro)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after the updates that were called before."""
        async with self._updating:
            source = Source.trainer(self._optimizer.steps)
            budget = self._config.micro_batch_tokens
            return batch.assign(logprobs=logprobs(self._model, one_by_one(self._predicted), batch, budget, source))

    async def weights(self) -> Weights:
        """A copy of the weights, after the updates that were called before; of adapted ones as `lora.sync` says."""
        async with self._updating:
            version = self._optimizer.steps
            asked = probe(self._model, one_by_one(self._predicted), version, self._config.micro_batch_tokens)
            tensors = published(self._model.tensors(), self._config.lora)
            return self._sender.weights(version, arrays(tensors.items()), asked)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, or the adapters as peft does, whole or not at all."""
        if self._config.lora is None:
            checkpoint.write(self._model, folder)
        else:
            checkpoint.write_adapters(self._model, folder, self._model.tensors(), self._config)

    @property
    def _state(self) -> TrainingState:
        tensors = self._trained if self._config.lora else self._model.tensors()
        return TrainingState("policy", tensors, self._trained, self._optimizer)
