"""`meshrl serve`: what a run's folder names is not run, and new weights take a key."""

import sys
from pathlib import Path

import pytest
import tomli_w

from meshrl.errors import ModelError
from meshrl.roles import ServerAddress
from meshrl.run import serve
from meshrl_vllm import guard

POLICY = {"backend": "torch", "model": {"characters": "ab"}}
STANDIN = """#!/bin/sh
head -n 1 > "$0.key"
printf '%s ' "$@" > "$0.options"
echo "it was run with $VLLM_SERVER_DEV_MODE"
exit 3
"""


def interpreter(path: Path) -> Path:
    """One that leaves a trace, and ends."""
    path.write_text(STANDIN)
    path.chmod(0o700)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that names the interpreter `program` beside it."""
    program = interpreter(tmp_path / "program")
    folder = tmp_path / "mine"
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    table = {"policy": POLICY, "sampler": {"backend": "vllm", "vllm": {"python": str(program), "kv_cache_mib": 7}}}
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    return folder


async def served(run: Path, **given: object) -> str:
    """What serving says that fails."""
    with pytest.raises(ModelError) as raised:
        await serve(run, ServerAddress.model_validate({"port": 18_471, **given}), lambda _: None)
    return str(raised.value)


async def test_an_interpreter_that_a_folder_names_is_not_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, own = run.with_name("program"), interpreter(run.with_name("own"))
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setattr("meshrl_inference.options.find_spec", lambda _: True)  # it has vLLM
    said = await served(run)
    assert "it was run with" in said
    assert f"config.toml names the interpreter {program}, which is not run without --python {program}" in said
    assert not program.with_name("program.options").exists()
    options = own.with_name("own.options").read_text()
    assert "--kv-cache-memory-bytes 7340032" in options  # the rest of the table holds
    assert "--middleware" not in options


async def test_an_interpreter_that_the_user_names_is_run_and_told_a_key(run: Path) -> None:
    program, keys = run.with_name("program"), list[str]()
    for _ in range(2):
        said = await served(run, python=str(program), follow=True)
        assert "it was run with 1" in said
        assert "names the interpreter" not in said
        keys.append(program.with_name("program.key").read_text().strip())
        options = program.with_name("program.options").read_text()
        assert "--middleware meshrl_vllm.guard.Guard" in options
        assert keys[-1] not in options
    assert len(set(keys)) == 2
    assert min(map(len, keys)) > 40


async def asked(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> object:
    """The status of an answer."""
    sent: list[guard.Message] = []

    async def app(scope: guard.Message, receive: guard.Receive, send: guard.Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> guard.Message:
        return {}

    async def send(message: guard.Message) -> None:
        sent.append(message)

    await guard.Guard(app)({"type": kind, "path": path, "headers": headers}, receive, send)
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize("keys", [[], ["a secret"]], ids=["without", "with"])
async def test_who_has_no_key_may_ask_and_change_nothing(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "keys", keys)
    name = guard.HEADER.encode()
    for path in ("/v1/completions", "/v1/models", "/health", "/metrics"):
        assert await asked(path) == 200
    for path in ("/pause", "/collective_rpc", "/update_weights", "/v1", "/", "//health", "/health/", "/V1/models"):
        for headers in ([], [(name, b"")], [(name, b"another")], [(b"authorization", b"Bearer a secret")]):
            assert await asked(path, *headers) == 401
        assert await asked(path, kind="websocket") == 1008
        assert await asked(path, (name, b"a secret")) == (200 if keys else 401)
    assert await asked("", kind="lifespan") == 200
