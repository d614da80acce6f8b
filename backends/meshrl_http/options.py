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
    """Which servers draw for the backend `http`, and how they are asked."""

    urls: tuple[str, ...] = ()
    """Where they are, such as `http://10.0.0.7:8000`: one or more for each rank."""
    model: str | None = None
    """The name under which they serve the model; nothing means the only one that each serves."""
    key_env: str | None = None
    """The environment variable, on the ranks, that has the servers' API key. The key is in no configuration."""
    weights: Annotated[str | None, PathIn("(.+)")] = None
    """A folder that ranks and servers see under this name: new weights go through it; nothing means there are none."""
    patience: float = Field(default=300.0, gt=0)
    """Seconds without an answer of any server, asked again and again, after which the sampler fails."""

    @property
    def keeps_weights(self) -> str:
        """The key `weights`, where it is not set."""
        return "" if self.weights else "weights"

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if "@" in url or parts.query:  # its own words do not repeat it: it may be a secret
                raise ValueError(
                    "an address of a server has a user, a secret or a query in it: a key goes into the variable that "
                    "key_env names"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no address of a server: write it as http://HOST:PORT")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)

    def share(self, rank: int, ranks: int) -> Sequence[str]:
        """The servers of one of several ranks. ConfigError where there are too few."""
        if len(self.urls) < ranks:
            raise ConfigError(
                f"sampler.http.urls names {len(self.urls)} servers for {ranks} ranks: give each rank one or more of "
                "its own, or take fewer ranks: one rank asks any number of servers"
            )
        return self.urls[rank::ranks]

    def key(self) -> str | None:
        """The servers' API key; None where they ask for none. ConfigError where the variable is not set."""
        if self.key_env is None:
            return None
        if not (key := os.environ.get(self.key_env)):
            raise ConfigError(
                f"sampler.http.key_env: the environment variable {self.key_env} is not set here: export the servers' "
                "API key in it, on each machine that has ranks of the sampler"
            )
        return key
