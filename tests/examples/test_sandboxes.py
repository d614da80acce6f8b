"""The sandboxes that examples/sandboxes rents, on stand-ins for the packages of the three services."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.errors import MachineFault, SandboxError
from meshrl.tasks import open_sandbox
from tests.contracts.contracts import CALLS
from tests.contracts.sources import DISTRIBUTIONS
from tests.examples.rented import PACKAGES, Service
from tests.support.sandboxes import install, keeps_the_contract

FOLDER = Path(__file__).parents[2] / "examples" / "sandboxes"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))["project"]
KINDS = PROJECT["entry-points"]["meshrl.sandboxes"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service whose package is installed, and that of the example."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setitem(sys.modules, kind, PACKAGES[kind](made := Service(home)))
    monkeypatch.syspath_prepend(str(FOLDER))
    install(tmp_path, monkeypatch, "\n".join(f"{name} = {place}" for name, place in KINDS.items()))
    yield made
    sys.modules.pop(f"rented_sandboxes.on_{kind}", None)  # it holds the stand-in


@pytest.mark.process
async def test_a_rented_machine_keeps_the_contract_of_sandboxes(kind: str, service: Service) -> None:
    async with open_sandbox(f"{kind}:small") as sandbox:
        await keeps_the_contract(sandbox)
        long = await sandbox.exec(["printf", "%s", "'" * 50_000], stdin=b"unread", output_bytes=10)
        assert (long.status, long.output, long.left_out) == (0, "'" * 10, 49_990)
        assert (await sandbox.exec(["printf", "%s", "\udcff"])).output == "\ufffd", "a byte that is no text"
        assert (await sandbox.exec("sleep 600", seconds=0.0001)).status is None
        with pytest.raises(SandboxError, match=r"it told 's0\\ns1\\n *0', not one status and one size"):
            await sandbox.exec("echo s0 > /proc/$PPID/fd/5; exit 1")
        await sandbox.exec(f"truncate -s {(16 << 20) + 1} large")
        with pytest.raises(SandboxError, match=r"large of the sandbox cannot be read: it has 16777217 bytes"):
            await sandbox.read("large")
        service.down = "it was not found"
        for broken in (sandbox.exec("true"), sandbox.write("a", b""), sandbox.read("-")):
            with pytest.raises(SandboxError, match="it was not found"):
                await broken
    service.down = ""
    async with open_sandbox(f"{kind}:"):
        assert service.open
    assert service.open == []
    listed = {target: given for target, given in CALLS.items() if target.startswith(f"{kind}.") and not given.open}
    assert service.calls == listed, "they are those that tests/contracts compares with the package's sources"


@pytest.mark.process
async def test_a_machine_that_is_not_to_be_had_or_has_no_tools(kind: str, service: Service, tmp_path: Path) -> None:
    async def fails(why: str) -> None:
        with pytest.raises(MachineFault, match=f"'{kind}:small' did not start: .*{why}"):
            async with open_sandbox(f"{kind}:small"):
                pass
        assert service.open == []

    (tools := tmp_path / "tools").mkdir()
    (tools / "sh").symlink_to("/bin/sh")
    service.path = str(tools)
    await fails("lacks base64 mkdir tail tee wc GNU's timeout")
    service.down = "no machine is free"
    await fails("no machine is free")


def test_the_versions_are_those_of_the_contracts() -> None:
    pinned = {
        extra: [f"{each.name}=={each.version}"] for each in DISTRIBUTIONS for extra in [each.name] if extra in KINDS
    }
    assert PROJECT["optional-dependencies"] == pinned


def test_the_page_shows_an_adapter_as_it_is() -> None:
    page = (FOLDER.parents[1] / "docs" / "sandboxes.md").read_text("utf-8")
    adapter = (FOLDER / "rented_sandboxes" / "on_e2b.py").read_text("utf-8")
    assert adapter.endswith(page.partition("```py\n")[2].partition("```")[0])
