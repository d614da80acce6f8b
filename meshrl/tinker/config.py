"""The tables of a configuration that is served: the models, and the `[tinker]` table."""

from typing import Annotated

from pydantic import Field

from meshrl.config import Config
from meshrl.roles import PolicyConfig, SamplerConfig
from meshrl.run import RunConfig


class TenantConfig(Config):
    """One who may use the server, and how much of it."""

    key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the API key, in hexadecimal digits: `printf %s tml-KEY | sha256sum`. The SDK's keys begin with
    `tml-`."""
    models: int = Field(default=8, gt=0)
    """Models that are trained at once, at most."""
    requests: int = Field(default=1024, gt=0)
    """Requests that wait, at most. Further ones get status 429, after which the SDK tries again."""
    storage_gib: float = Field(default=100.0, gt=0)
    """GiB of checkpoints, states and journals, at most."""


class TinkerConfig(Config):
    """The server of the Tinker API."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, lt=2**16)
    """Port to listen on. 0 chooses a free one."""
    folder: str = "tinker"
    """The folder of sessions, models and checkpoints. A server that is started again with it continues with them."""
    model: str | None = None
    """Name of the model, as clients write it. They read the tokenizer of this name or folder. Default:
    `policy.model`."""
    adapters: int = Field(default=64, gt=0)
    """Models that are trained at once, of all tenants."""
    max_rank: int = Field(default=256, gt=0)
    """Rank of an adapter, at most."""
    state_every: int = Field(default=10, gt=0)
    """Optimizer steps of a model between two states on disk. After a restart, the requests since the last one are
    applied again."""
    record: bool = False
    """Keep journals whole, so that `meshrl replay` can repeat each model's requests from the first one."""
    samplers_kept: int = Field(default=16, gt=0)
    """Weights without a name that are kept for samplers, of each model."""
    body_mib: int = Field(default=64, gt=0)
    """Size of a request's body at most, in MiB."""
    requests: int = Field(default=8192, gt=0)
    """Requests that wait, at most. Further ones get status 429."""
    waiting_mib: int = Field(default=1024, gt=0)
    """Size of the bodies of all requests that wait, in MiB."""
    samples_mib: float = Field(default=256.0, gt=0)
    """Size of the results of samples that are kept of each tenant, in MiB: the newest that have not been fetched."""
    session_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without a sign of a session's client, after which its models no longer count for its tenant, and its
    requests that wait for another are dropped. The SDK gives a sign every 10 seconds."""
    timeout: float = Field(default=60.0, gt=0)
    """Time limit in seconds for a client to send a body."""
    compress: bool = False
    """Ask clients to compress the rows of passes, for a slow network. Compressed bodies are always read."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], TenantConfig] = Field(default={})
    """Those who may use the server, by name. Without any, every key is the tenant `default`: for this machine alone."""


class ServedConfig(Config):
    """What `meshrl tinker` reads of a configuration."""

    policy: PolicyConfig
    """The model that is trained. With `lora`, all clients train adapters on it, without it all weights."""
    sampler: SamplerConfig
    tinker: TinkerConfig = TinkerConfig()
    run: RunConfig = RunConfig(name="tinker")

    @property
    def model(self) -> str:
        """The model's name, as clients write it."""
        return self.tinker.model or str(self.policy.model)
