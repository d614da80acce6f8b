"""The requests that vLLM's server and SGLang's need for the same operations."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Final, Protocol

from meshrl.data import Branch
from meshrl.errors import ModelError
from meshrl_http.client import SHORT, Client, NoAnswerError, RefusedError


@dataclass(frozen=True)
class DrawRequest:
    """Tokens to continue, and how to sample."""

    name: str
    """Unique among requests."""
    tokens: Sequence[int]
    limit: int
    """New tokens at most."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ends: Sequence[int] = ()
    stop: Sequence[str] = ()
    salt: str = "none"
    """Requests with different salts share no cached prefixes."""
    branch: Branch | None = None
    """What holds the new tokens. None if nothing does."""


@dataclass(frozen=True)
class Piece:
    """Tokens that a server has sampled."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    """`stop`, `length` or `abort`."""
    tag: str | None = None
    """The server's tag of the weights at the end, if it reports one."""


class Dialect(Protocol):
    """The requests of one kind of server. `model` is the served name."""

    title: ClassVar[str]
    temperatures: ClassVar[tuple[float, float]]
    """The lowest temperature above 0 and the highest that it supports."""
    spare: ClassVar[int]
    """Places of its longest sequence that tokens cannot use."""
    restricts_twice: ClassVar[bool]
    """True if `top_p` applies to what `top_k` leaves."""

    async def version(self, client: Client) -> str:
        """Return the version of its package."""
        ...

    async def seeded(self, client: Client) -> bool:
        """True if each request is sampled with its own seed."""
        ...

    async def tag(self, client: Client) -> str | None:
        """Return the tag of its weights. None if it cannot load others."""
        ...

    async def draw(self, client: Client, model: str, request: DrawRequest) -> Piece:
        """Continue tokens."""
        ...

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        """Return the log-probs of tokens except the first, at temperature 1."""
        ...

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        """End requests as they are, as far as the server knows them. False if it cannot."""
        ...

    async def update(self, client: Client, folder: str, tag: str) -> None:
        """Load the weights of a folder, while nothing is sampled."""
        ...


class _Vllm:
    """vLLM's server, `vllm serve`. Loads weights and aborts through endpoints that VLLM_SERVER_DEV_MODE=1 adds."""

    title: ClassVar = "vLLM"
    temperatures: ClassVar = (0.01, 2.0)
    spare: ClassVar = 0
    restricts_twice: ClassVar = True

    async def version(self, client: Client) -> str:
        return str((await client.get("/version"))["version"])

    async def seeded(self, client: Client) -> bool:
        return True

    async def tag(self, client: Client) -> str | None:
        """Return the tag of its weights. None without its endpoints for new ones."""
        try:
            return str((await client.get("/weight_info"))["weight_version"])
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    async def draw(self, client: Client, model: str, request: DrawRequest) -> Piece:
        (choice,) = (await client.post("/v1/completions", _completion(model, request)))["choices"]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        return _piece(client, request, tokens, logprobs, choice["finish_reason"])

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        request = DrawRequest(f"{salt} probe", tokens, 1, temperature=0, salt=salt)
        (choice,) = (await client.post("/v1/completions", {**_completion(model, request), "echo": True}))["choices"]
        values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        return _values(client, values[1 : len(tokens)], tokens)

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        try:
            # vLLM's name for the only sequence of a completion.
            await client.post("/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in names]}, SHORT)
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def update(self, client: Client, folder: str, tag: str) -> None:
        """Load the weights of a folder. vLLM ends if it cannot read the folder."""
        await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await client.post("/update_weight_version", {"new_version": tag}, SHORT)


class _Sglang:
    """SGLang's server, by its endpoints."""

    title: ClassVar = "SGLang"
    temperatures: ClassVar = (1e-6, inf)
    spare: ClassVar = 8
    restricts_twice: ClassVar = False

    async def version(self, client: Client) -> str:
        return str((await client.get("/server_info"))["version"])

    async def seeded(self, client: Client) -> bool:
        return bool((await client.get("/server_info")).get("enable_deterministic_inference"))

    async def tag(self, client: Client) -> str | None:
        return str((await client.get("/model_info"))["weight_version"])

    async def draw(self, client: Client, model: str, request: DrawRequest) -> Piece:
        facts = (await self._generate(client, request))["meta_info"]
        pairs = facts.get("output_token_logprobs")
        tokens, logprobs = ([pair[at] for pair in pairs] if pairs is not None else None for at in (1, 0))
        reason = (facts.get("finish_reason") or {}).get("type", "abort")
        return _piece(client, request, tokens, logprobs, reason, facts.get("weight_version"))

    async def read(self, client: Client, model: str, tokens: Sequence[int], salt: str) -> list[float]:
        request = DrawRequest("", tokens, 1, temperature=0, salt=salt)
        facts = (await self._generate(client, request, logprob_start_len=0))["meta_info"]
        return _values(client, [pair[0] for pair in facts.get("input_token_logprobs", ())][1:], tokens)

    async def abort(self, client: Client, names: Sequence[str]) -> bool:
        for name in names:
            await client.post("/abort_request", {"rid": name}, SHORT)
        return True

    async def update(self, client: Client, folder: str, tag: str) -> None:
        order = {"model_path": folder, "weight_version": tag, "flush_cache": True, "load_format": "auto"}
        answer = await client.post("/update_weights_from_disk", order)
        if not answer["success"]:
            raise ModelError(f"{client.url} does not take weights: {answer['message']}")

    async def _generate(self, client: Client, request: DrawRequest, **more: object) -> Any:
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_new_tokens": request.limit,
            "sampling_seed": request.seed,
            "stop_token_ids": list(request.ends),
            "ignore_eos": not request.ends,
            "stop": list(request.stop) or None,
            "no_stop_trim": True,
            "skip_special_tokens": False,  # stop texts may have some
            **_PLAIN,
            **_sglang_rule(request.branch),
        }
        body: dict[str, object] = {
            "input_ids": list(request.tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "cache_salt": request.salt,
            **({"rid": request.name} if request.name else {}),
            **more,
        }
        return await client.post("/generate", body)


_PLAIN: Final[Mapping[str, float]] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Overrides what a server would read from the model's generation_config.json."""
DIALECTS: Final[Mapping[str, Dialect]] = {"vllm": _Vllm(), "sglang": _Sglang()}
"""By the owner that a server reports for its models."""


def _completion(model: str, request: DrawRequest) -> dict[str, object]:
    """Return the body of a request for a completion, with token ids and log-probs."""
    return {
        "model": model,
        "prompt": list(request.tokens),
        "request_id": request.name,
        "max_tokens": request.limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "ignore_eos": True,  # meshrl decides where rows end
        "stop_token_ids": list(request.ends),
        "stop": list(request.stop),
        "skip_special_tokens": False,  # stop texts may have some
        "cache_salt": request.salt,
        "logprobs": 0,
        "return_token_ids": True,
        **_PLAIN,
        **({"structured_outputs": _vllm_rule(request.branch)} if request.branch else {}),
    }


def _vllm_rule(branch: Branch) -> Mapping[str, object]:
    if branch.choices:
        return {"choice": list(branch.choices)}
    return {"json": branch.schema} if branch.regex is None else {"regex": branch.regex}


def _sglang_rule(branch: Branch | None) -> Mapping[str, object]:
    if branch is None:
        return {}
    if branch.schema is not None:
        return {"json_schema": json.dumps(branch.schema)}
    return {"regex": branch.regex or "|".join(f"({re.escape(choice)})" for choice in branch.choices)}


def _piece(
    client: Client, request: DrawRequest, tokens: object, logprobs: object, reason: str, tag: str | None = None
) -> Piece:
    """Return the sampled tokens. ModelError if a server returns no token ids, or no log-probs."""
    if reason == "abort" and not tokens:  # it had not begun
        return Piece([], [], reason, tag)
    for found, what in ((tokens, "token ids"), (logprobs, "log-probs")):
        if not isinstance(found, list) or not found or None in found:
            raise ModelError(f"{client.url} returns no {what} of its tokens, which training needs: use a newer server")
    drawn, values = [int(token) for token in tokens], [float(value) for value in logprobs]  # type: ignore[attr-defined]
    if len(drawn) != len(values) or len(drawn) > request.limit:
        raise NoAnswerError(
            f"{len(drawn)} tokens came with {len(values)} log-probs, and {request.limit} were asked for"
        )
    return Piece(drawn, values, reason, tag)


def _values(client: Client, values: Sequence[object], tokens: Sequence[int]) -> list[float]:
    found = [float(value) for value in values if isinstance(value, int | float)]
    if len(found) != len(tokens) - 1:
        raise ModelError(
            f"{client.url} returns no log-probs of a prompt, which are needed to verify weights: use a newer server"
        )
    return found
