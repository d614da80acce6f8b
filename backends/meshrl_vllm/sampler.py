"""The sampler of the vLLM backend."""

from typing import ClassVar

from meshrl.data import Constraint
from meshrl.errors import ModelError
from meshrl_inference.process import Kind
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.model.masks import check_grammar, plain_lark
from meshrl_torch.sample.rollouts import Request
from meshrl_vllm.image_models import check_images
from meshrl_vllm.options import VllmConfig


class VllmSampler(EngineSampler):
    """Rollouts by vLLM."""

    kind: ClassVar = Kind("vllm", "vLLM", reads_broadcasts=True, takes_adapters=True, sees=True)
    options: ClassVar = VllmConfig
    temperatures: ClassVar = (0.01, 2.0)
    """Below the first, vLLM silently samples at the first."""

    def _takes_images(self) -> bool:
        try:
            check_images(self._config)
        except ModelError:
            return False
        return True

    def _check_images(self, request: Request) -> None:
        if request.images is not None:
            check_images(self._config)

    def rule_of(self, constraint: Constraint) -> str:
        """Return the grammar that vLLM's backend "guidance" follows. DataError if it cannot follow that."""
        check_grammar(constraint)
        return plain_lark(self._words, constraint)
