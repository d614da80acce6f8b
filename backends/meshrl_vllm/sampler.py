"""The sampler of the vLLM backend."""

from typing import ClassVar

from meshrl.data import Constraint
from meshrl.errors import DataError
from meshrl_inference.process import Kind
from meshrl_inference.sampler import EngineSampler
from meshrl_torch.model.masks import check_grammar, lark_of, special_tokens
from meshrl_vllm.options import VllmConfig


class VllmSampler(EngineSampler):
    """Rollouts by vLLM."""

    kind: ClassVar = Kind("vllm", "vLLM", reads_broadcasts=True, takes_adapters=True)
    options: ClassVar = VllmConfig
    temperatures: ClassVar = (0.01, 2.0)
    """Below the first, vLLM silently samples at the first."""

    def rule_of(self, constraint: Constraint) -> str:
        """Return the grammar that vLLM's backend "guidance" follows. DataError if it cannot follow that."""
        check_grammar(constraint)
        rule = lark_of(constraint, {})
        if rule != lark_of(constraint, special_tokens(self._words.tokenizer)):
            raise DataError(
                f"{constraint.text[:200]}: it has a special token of this model, which vLLM takes in no grammar: use "
                'sampler.backend = "torch"'
            )
        return rule
