"""How vLLM's server and SGLang's are asked for the same things."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Final, Protocol

from meshrl.errors import ModelError
from meshrl_http.client import SHORT, Client, NoAnswerError, RefusedError


@dataclass(frozen=True)
class Ask:
    """Tokens to go on after, and how."""

    name: str
    """No other request has it."""
    tokens: Sequence[int]
    limit: int
    """New tokens, at most."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ends: Sequence[int] = ()
    stop: Sequence[str] = ()
    salt: str = "none"
    """Requests of different salts share nothing of what was read."""


@dataclass(frozen=True)
class Piece:
    """What a server has drawn."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    """`stop`, `length` or `abort`."""
    tag: str | None = None
    """What it calls the weights that it ended with, where it tells."""


class Dialect(Protocol):
    """What one kind of server is asked, and how; `model` is the name that it serves it under."""

    title: ClassVar[str]
    temperatures: ClassVar[tuple[float, float]]
    """The lowest above 0 and the highest that it draws at."""
    spare: ClassVar[int]
    """Places of its longest sequence that no token may have."""
    restricts_twice: ClassVar[bool]
    """Whether `top_p` is of what `top_k` leaves."""

    async def version(self, client: Client) -> str:
        """Of its package."""
        ...

    async def seeded(self, client: Client) -> bool:
        """Whether each request is drawn by its own seed."""
        ...

    async def tag(self, client: Client) -> str | None:
        """What it calls the weights that it has; None where it takes no others."""
        ...

    async def draw(self, client: Client, model: str, ask: Ask) -> Piece:
        """Go on after tokens."""
        ...

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        """The log-probs of tokens but the first, at the temperature 1."""
        ...

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        """Let requests end as they are, those that the server knows of by now; False where it cannot."""
        ...

    async def update(self, client: Client, folder: str, tag: str) -> None:
        """Take the weights of a folder, where nothing is drawn."""
        ...


class Vllm:
    """vLLM's own server, `vllm serve`: new weights and aborts by the endpoints that VLLM_SERVER_DEV_MODE=1 adds."""

    title: ClassVar = "vLLM"
    temperatures: ClassVar = (0.01, 2.0)
    spare: ClassVar = 0
    restricts_twice: ClassVar = True

    async def version(self, client: Client) -> str:
        """Of its package."""
        return str((await client.get("/version"))["version"])

    async def seeded(self, client: Client) -> bool:
        """Whether each request is drawn by its own seed."""
        return True

    async def tag(self, client: Client) -> str | None:
        """What it calls the weights that it has; None without its endpoints for new ones."""
        try:
            return str((await client.get("/weight_info"))["weight_version"])
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    async def draw(self, client: Client, model: str, ask: Ask) -> Piece:
        """Go on after tokens."""
        (choice,) = (await client.post("/v1/completions", _completion(model, ask)))["choices"]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        return _piece(client, ask, tokens, logprobs, choice["finish_reason"])

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        """The log-probs of tokens but the first."""
        ask = Ask(f"{salt} probe", tokens, 1, temperature=0, salt=salt)
        (choice,) = (await client.post("/v1/completions", {**_completion(model, ask), "echo": True}))["choices"]
        values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        return _values(client, values[1 : len(tokens)], tokens)

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        """Let requests end as they are."""
        try:
            # Its own name for the first and only sequence of a completion.
            await client.post("/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in names]}, SHORT)
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def update(self, client: Client, folder: str, tag: str) -> None:
        """Take the weights of a folder. A folder that it cannot read ends vLLM."""
        await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await client.post("/update_weight_version", {"new_version": tag}, SHORT)


class Sglang:
    """SGLang's own server, by its own endpoints."""

    title: ClassVar = "SGLang"
    temperatures: ClassVar = (1e-6, inf)
    spare: ClassVar = 8
    restricts_twice: ClassVar = False

    async def version(self, client: Client) -> str:
        """Of its package."""
        return str((await client.get("/server_info"))["version"])

    async def seeded(self, client: Client) -> bool:
        """Whether each request is drawn by its own seed."""
        return bool((await client.get("/server_info")).get("enable_deterministic_inference"))

    async def tag(self, client: Client) -> str | None:
        """What it calls the weights that it has."""
        return str((await client.get("/model_info"))["weight_version"])

    async def draw(self, client: Client, model: str, ask: Ask) -> Piece:
        """Go on after tokens."""
        facts = (await self._generate(client, ask))["meta_info"]
        pairs = facts.get("output_token_logprobs")
        tokens, logprobs = ([pair[at] for pair in pairs] if pairs is not None else None for at in (1, 0))
        reason = (facts.get("finish_reason") or {}).get("type", "abort")
        return _piece(client, ask, tokens, logprobs, reason, facts.get("weight_version"))

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        """The log-probs of tokens but the first."""
        ask = Ask("", tokens, 1, temperature=0, salt=salt)
        facts = (await self._generate(client, ask, logprob_start_len=0))["meta_info"]
        return _values(client, [pair[0] for pair in facts.get("input_token_logprobs", ())][1:], tokens)

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        """Let requests end as they are."""
        for name in names:
            await client.post("/abort_request", {"rid": name}, SHORT)
        return True

    async def update(self, client: Client, folder: str, tag: str) -> None:
        """Take the weights of a folder."""
        order = {"model_path": folder, "weight_version": tag, "flush_cache": True, "load_format": "auto"}
        told = await client.post("/update_weights_from_disk", order)
        if not told["success"]:
            raise ModelError(f"{client.url} does not take weights: {told['message']}")

    async def _generate(self, client: Client, ask: Ask, **more: object) -> Any:
        sampling = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or -1,
            "max_new_tokens": ask.limit,
            "sampling_seed": ask.seed,
            "stop_token_ids": list(ask.ends),
            "ignore_eos": not ask.ends,
            "stop": list(ask.stop) or None,
            "no_stop_trim": True,
            **_PLAIN,
        }
        body: dict[str, object] = {
            "input_ids": list(ask.tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "cache_salt": ask.salt,
            **({"rid": ask.name} if ask.name else {}),
            **more,
        }
        return await client.post("/generate", body)


_PLAIN: Final[Mapping[str, float]] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a server might take from the model's generation_config.json instead."""
DIALECTS: Final[Mapping[str, Dialect]] = {"vllm": Vllm(), "sglang": Sglang()}
"""By who a server says owns its models."""


def _completion(model: str, ask: Ask) -> dict[str, object]:
    """The body of a request for a completion, with token ids and log-probs."""
    return {
        "model": model,
        "prompt": list(ask.tokens),
        "request_id": ask.name,
        "max_tokens": ask.limit,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "seed": ask.seed,
        "ignore_eos": True,  # the ends are ours
        "stop_token_ids": list(ask.ends),
        "stop": list(ask.stop),
        "cache_salt": ask.salt,
        "logprobs": 0,
        "return_token_ids": True,
        **_PLAIN,
    }


def _piece(client: Client, ask: Ask, tokens: object, logprobs: object, reason: str, tag: str | None = None) -> Piece:
    """What was drawn. ModelError where a server tells no token ids, or no log-probs."""
    if reason == "abort" and not tokens:  # it had not begun
        return Piece([], [], reason, tag)
    for found, what in ((tokens, "token ids"), (logprobs, "log-probs")):
        if not isinstance(found, list) or not found or None in found:
            raise ModelError(f"{client.url} tells no {what} of its tokens, which training needs: use a newer server")
    drawn, values = [int(token) for token in tokens], [float(value) for value in logprobs]  # type: ignore[attr-defined]
    if len(drawn) != len(values) or len(drawn) > ask.limit:
        raise NoAnswerError(f"{len(drawn)} tokens came with {len(values)} log-probs, and {ask.limit} were asked for")
    return Piece(drawn, values, reason, tag)


def _values(client: Client, values: Sequence[object], tokens: Sequence[int]) -> list[float]:
    found = [float(value) for value in values if isinstance(value, int | float)]
    if len(found) != len(tokens) - 1:
        raise ModelError(
            f"{client.url} returns no log-probs of a prompt, which are needed to verify weights: use a newer server"
        )
    return found
