"""An HTTP server for a trained model: the class that backends implement, and its configuration."""

from abc import ABC, abstractmethod
from typing import Literal

from pydantic import Field, JsonValue

from meshrl.config import Config
from meshrl.roles.config import RoleConfig


class ServerAddress(Config):
    """Address and options of a server, as the user gives them."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, gt=0, lt=65536)
    python: str | None = None
    """The interpreter of an environment that has the server. Default: this one."""
    follow: bool = False
    """Load each newer model of the run."""

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class ServerConfig(ServerAddress, RoleConfig):
    """The configuration of a server."""

    role = "Server"

    model: str
    """A Hugging Face folder, as an absolute path."""
    name: str
    """The model's name in requests."""
    dtype: Literal["float32", "bfloat16"]
    prompt: str
    """A prompt for the example."""
    chat: bool
    """True if a prompt is sent as a user's message."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Variables of the chat template."""
    max_tokens: int


class Server(ABC):
    """A process that answers requests over HTTP. The constructor takes a ServerConfig and starts it."""

    @abstractmethod
    async def started(self) -> str:
        """Wait until the server answers, and return a shell command that sends it a request."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if the server has ended."""

    @abstractmethod
    async def load(self, folder: str, version: str) -> None:
        """Load the weights of a Hugging Face folder, an absolute path. Running requests continue with them."""

    @abstractmethod
    def close(self) -> None:
        """Stop the server."""
