"""The roles of the backend `megatron`: a model split over its ranks, which call each method together."""

from meshrl.data import Batch, Weights
from meshrl.errors import ConfigError, DataError
from meshrl.roles import (
    CriticConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    options_of,
)
from meshrl_megatron.model import build
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.trainable import Pipelined
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.reward_head import ScoreModel
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.scoring import check_readable
from meshrl_torch.train.roles import (
    FrozenReference,
    FrozenReward,
    Spread,
    TrainedCritic,
    TrainedPolicy,
    TrainedRewardModel,
)
from meshrl_torch.train.trainable import own_rank
from meshrl_torch.weights.transfer import Form, check_weights, copy_into


class MegatronPolicy(Spread, TrainedPolicy):
    """A model split over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: use backend = \"fsdp\", or remove lora")
        super().__init__(config, Pipelined(config, "logprobs"))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)
        if COLUMN in batch:
            raise DataError(
                f"`{COLUMN}` has the experts that a sampler chose, which the backend 'megatron' cannot use: "
                'remove sampler.record_experts, or use backend = "fsdp"'
            )


class MegatronCritic(Spread, TrainedCritic):
    """A model with a value head, split over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(Pipelined(config, "values"))


class MegatronRewardModel(Spread, TrainedRewardModel):
    """A model with a scoring head, split over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        trainable = Pipelined(config, "scores")
        super().__init__(ScoreModel(trainable.passes.model, config), trainable)


class MegatronReference(Spread, FrozenReference):
    """A model in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._dtype = config.dtype
        self._model = build(config, options_of(config, MegatronConfig), own_rank())
        super().__init__(Pipeline(self._model.stages, self._model, valued=False).passes(config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's parts of the weights in place."""
        boxes = [box for held in self._model.held for box in self._model.boxes(held, held.parameter.detach())]
        told = self.agree(lambda: {box.name: box.size for box in boxes})
        forms = {name: Form(self._dtype, size) for each in told for name, size in each.items()}
        self.agree(lambda: check_weights(forms, weights))
        for box in boxes:
            spans = tuple(slice(start, end) for start, end in box.ranges)
            copy_into(box.tensor, weights.tensors[box.name][spans])


class MegatronReward(Spread, FrozenReward):
    """A sequence classifier with one label in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: RewardModelConfig) -> None:
        model = build(config, options_of(config, MegatronConfig), own_rank(), predicts="scores")
        passes = Pipeline(model.stages, model, valued=True).passes(config.micro_batch_tokens)
        super().__init__(ScoreModel(model.words, config), passes)
