"""The sampler of the http backend."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

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

    def _check_draws(self, sampling: Sampling) -> None:
        self._servers.check(sampling)
