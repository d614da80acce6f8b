"""The table `[sampler.http]`."""

import os
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from meshrl.config import PathIn
from meshrl.errors import ConfigError
from meshrl.roles import BackendOptions


class HttpConfig(BackendOptions):
    """The servers that sample for the backend `http`, and how to reach them."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers, such as `http://10.0.0.7:8000`: one or more for each rank."""
    model: str | None = None
    """Name of the model at the servers. Default: the only model that each serves."""
    key_env: str | None = None
    """Environment variable on the ranks that holds the servers' API key. The key itself is in no configuration."""
    weights: Annotated[str | None, PathIn("(.+)")] = None
    """Folder for new weights, which ranks and servers see under this path. By default servers keep their weights."""
    patience: float = Field(default=300.0, gt=0)
    """Seconds of retries without an answer from any server before the sampler fails."""

    @property
    def samples_elsewhere(self) -> bool:
        """True: the servers sample."""
        return True

    @property
    def keeps_weights(self) -> str:
        """The key `weights` if it is not set, else empty."""
        return "" if self.weights else "weights"

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if "@" in url or parts.query:  # do not repeat the address, which may be a secret
                raise ValueError(
                    "an address of a server contains a user, a secret or a query: put the key into the environment "
                    "variable that key_env names"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not the address of a server: write it as http://HOST:PORT")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)

    def share(self, rank: int, ranks: int) -> Sequence[str]:
        """Return the servers of one rank. ConfigError if there are fewer servers than ranks."""
        if len(self.urls) < ranks:
            raise ConfigError(
                f"sampler.http.urls names {len(self.urls)} servers for {ranks} ranks: name at least one for each rank, "
                "or use fewer ranks. One rank can use any number of servers"
            )
        return self.urls[rank::ranks]

    def key(self) -> str | None:
        """Return the servers' API key, or None if they need none. ConfigError if the variable is not set."""
        if self.key_env is None:
            return None
        if not (key := os.environ.get(self.key_env)):
            raise ConfigError(
                f"sampler.http.key_env: the environment variable {self.key_env} is not set here: export the servers' "
                "API key in it, on each machine that has ranks of the sampler"
            )
        return key
