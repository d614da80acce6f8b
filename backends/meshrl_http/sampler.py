"""The sampler of the http backend."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from meshrl.data import Constraint
from meshrl.errors import DataError
from meshrl.mesh import current_rank
from meshrl.roles import Sampling, options_of
from meshrl_http.options import HttpConfig
from meshrl_http.servers import Servers
from meshrl_inference.process import Kind
from meshrl_inference.sampler import EngineSampler


class HttpSampler(EngineSampler):
    """Rollouts by external servers. Each rank has its own servers."""

    kind: ClassVar = Kind("http", "HTTP")
    axes: ClassVar = ("dp",)

    def _start(self, folder: Path, gpus: list[str]) -> Servers:
        rank = current_rank()
        urls = options_of(self._config, HttpConfig).share(rank.index, rank.size)
        self._servers = Servers(self._config, urls, folder, self._words)
        longest = min(self._words.max_tokens, self._servers.max_tokens)
        self._words = replace(self._words, max_tokens=longest)
        return self._servers

    @property
    def _recomputes(self) -> bool:
        return True

    def rule_of(self, constraint: Constraint) -> str:
        """Return the constraint's text. DataError unless it is plain: servers differ in all others."""
        if not constraint.is_plain:
            raise DataError(
                f"{constraint.text[:200]}: a server holds an answer to a schema, an expression or choices alone, "
                'without calls of tools and without an open thought: use sampler.backend = "torch" or "vllm"'
            )
        return constraint.text

    def _check_draws(self, sampling: Sampling) -> None:
        self._servers.check(sampling)
