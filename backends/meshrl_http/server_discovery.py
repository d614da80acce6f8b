"""Find out what a server is by querying it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl import log
from meshrl.errors import BackendError, ConfigError, DataError, MeshrlError, ModelError
from meshrl.roles import RoleConfig, Sampling, options_of
from meshrl_http.client import Client, NoAnswerError
from meshrl_http.dialects import DIALECTS, Dialect, DrawRequest
from meshrl_http.options import HttpConfig
from meshrl_inference.options import check_temperature

_TRIED: Final = 4
"""Number of prompts whose log-probs are compared."""
_KNOWN: Final = 8
"""Tokens in these prompts. Every model has as many."""
_APART: Final = 0.1
"""Least difference of log-probs that counts. In bfloat16 they differ less."""


@dataclass(frozen=True)
class ServerInfo:
    """A server's properties."""

    dialect: Dialect
    version: str
    """The version of its package."""
    model: str
    """The name of the served model."""
    max_tokens: int | None
    """The longest sequence that it accepts. None if it does not say."""
    takes_weights: bool
    seeded: bool
    """True if it samples each row with the row's seed."""
    tempered: bool
    """True if its log-probs are those at the temperature."""
    whole: bool
    """True if its log-probs are those of the whole distribution, regardless of `top_p` and `top_k`."""

    def __str__(self) -> str:
        longest = f", up to {self.max_tokens} tokens" if self.max_tokens else ""
        weights = "takes new weights" if self.takes_weights else "takes no new weights"
        drawn = "at the temperature" if self.tempered else "at temperature 1"
        seeds = "" if self.seeded else "; draws by no seed of a row, so that rows cannot be repeated"
        return (
            f"{self.dialect.title} {self.version} serves {self.model!r}{longest}; {weights}; log-probs are {drawn}, "
            f"of {'the whole distribution' if self.whole else 'what top_p and top_k leave'}{seeds}"
        )

    @property
    def longest(self) -> int | None:
        """Most tokens of a row. None if the server does not say."""
        return None if self.max_tokens is None else self.max_tokens - self.dialect.spare

    def check(self, url: str, sampling: Sampling) -> None:
        """Raise DataError if it cannot sample this way, or if its log-probs would differ from the trainer's."""
        check_temperature(self.dialect.title, self.dialect.temperatures, sampling)
        if not self.tempered and sampling.temperature not in (0, 1):
            raise DataError(
                f"{url} returns log-probs at temperature 1, but rows are sampled at {sampling.temperature:g}: start "
                "vLLM with --logprobs-mode processed_logprobs, or give temperature = 1"
            )
        restrictions = [("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0)]
        restricted = [f"{key} = {value:g}" for key, value, off in restrictions if value != off]
        if restricted and not self.whole:
            raise DataError(
                f"{url} returns log-probs of the tokens that {' and '.join(restricted)} leave, but a trainer's are of "
                "the whole distribution: remove these keys, or start vLLM with --logprobs-mode raw_logprobs and give "
                "temperature = 1"
            )
        if len(restricted) > 1 and not self.dialect.restricts_twice:
            raise DataError(
                f"{self.dialect.title} applies top_p to the whole distribution, not to the tokens that top_k leaves: "
                f"give one of {' and '.join(restricted)}"
            )


async def find(client: Client, wanted: str | None) -> ServerInfo:
    """Query a server. `wanted`: the name of the model to look for, if any.

    NoAnswerError if it does not answer, ModelError if it cannot be used.
    """
    cards = (await client.get("/v1/models")).get("data", [])
    names = [str(card["id"]) for card in cards if not card.get("parent")]
    named = [str(card["id"]) for card in cards]
    # SGLang names its model after its last loaded folder, and samples for any name.
    renamed = any(card.get("owned_by") == "sglang" for card in cards)
    if wanted is not None and wanted not in named and not renamed:
        raise ModelError(f"{client.url} serves {', '.join(map(repr, names))}, and not sampler.http.model = {wanted!r}")
    if wanted is None and len(names) != 1:
        raise ModelError(
            f"{client.url} serves {', '.join(map(repr, names)) or 'no model'}: name one: sampler.http.model"
        )
    model = wanted if wanted in named else names[0]
    card = next(card for card in cards if card["id"] == model)
    dialect = DIALECTS.get(str(card.get("owned_by")))
    if dialect is None:
        raise ModelError(
            f"{client.url} says that {card.get('owned_by')!r} owns its model: it is neither a vLLM nor an SGLang "
            "server, and other servers do not return the token ids and log-probs that training needs"
        )
    tempered, whole = await _probe_logprobs(client, dialect, model)
    return ServerInfo(
        dialect,
        await dialect.version(client),
        model,
        card.get("max_model_len"),
        await dialect.tag(client) is not None,
        await dialect.seeded(client),
        tempered,
        whole,
    )


async def _probe_logprobs(client: Client, dialect: Dialect, model: str) -> tuple[bool, bool]:
    """Measure if log-probs are at the temperature, and of the whole distribution. True only if samples show it.

    Sampled tokens are read again, which gives their log-probs at temperature 1. The median of several prompts decides,
    because in half precision a server may read a token differently than it sampled it.
    """
    numbers = np.random.default_rng(0).integers(2, _KNOWN, (_TRIED, 6))

    async def apart(number: int, temperature: float, top_k: int) -> tuple[float, float]:
        prompt: list[int] = numbers[number].tolist()
        name = f"meshrl-{np.random.default_rng().integers(1 << 62)}"
        request = DrawRequest(name, prompt, 1, temperature=temperature, top_k=top_k, seed=number, salt=name)
        piece = await dialect.draw(client, model, request)
        read = (await dialect.read(client, model, [*prompt, *piece.tokens[:1]], name))[-1]
        return abs(piece.logprobs[0] - read), -read

    # A model that is sure of every token shows it in one, and a model that is sure of none in the other.
    hot = await asyncio.gather(*(apart(number, 2.0, 0) for number in range(_TRIED)))
    cold = await asyncio.gather(*(apart(number, 0.05, 0) for number in range(_TRIED)))
    changed = np.maximum([far for far, _ in hot], [far for far, _ in cold])
    first = await asyncio.gather(*(apart(number, 1.0, 1) for number in range(_TRIED)))
    shown = any(surprise > 2 * _APART for _, surprise in first)
    return bool(np.median(changed) > _APART), shown and bool(np.median([far for far, _ in first]) < _APART)


def check_servers(config: RoleConfig) -> None:
    """Log what each server of a table is. BackendError if one cannot be used."""
    options = options_of(config, HttpConfig)
    if not options.urls:
        raise BackendError('sampler.http.urls names no server: urls = ["http://HOST:PORT"]')
    try:
        key = options.key()
    except ConfigError as error:
        raise BackendError(str(error)) from None
    with ThreadPoolExecutor(1) as thread:  # this thread may have a running loop
        for url, found in zip(options.urls, thread.submit(_find_all, options, key).result(), strict=True):
            log.info(f"{url}: {found}")
            if options.weights and not found.takes_weights:
                raise BackendError(no_weights(url))


def no_weights(url: str) -> str:
    """Say why a server cannot load weights."""
    return (
        f"{url} has no endpoints for new weights: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, where "
        "nobody else reaches it, or leave sampler.http.weights out, and its weights stay as they are"
    )


def _find_all(options: HttpConfig, key: str | None) -> Sequence[ServerInfo]:
    async def one(url: str) -> ServerInfo:
        async with aclosing(Client(url, key, 2 * _TRIED)) as client:
            try:
                return await find(client, options.model)
            except NoAnswerError as error:
                raise BackendError(f"no answer from {url}: {error}. Is a server running there?") from None
            except BackendError:
                raise
            except MeshrlError as error:
                raise BackendError(str(error)) from None

    async def every() -> Sequence[ServerInfo]:
        return await asyncio.gather(*map(one, options.urls))

    return asyncio.run(every())
