"""Calls into packages that only a GPU or a service runs are those that they take, by their own sources, read as text.

They are listed in `calls.toml`. What the packages take is committed in `signatures/`, so that no network is needed, and
compared with the release itself where its sources are here.
"""

import re

from tests.contracts.contracts import CALLS, SIGNATURES, read, real, refusal
from tests.contracts.sources import DISTRIBUTIONS, ROOT, signature

KNOWN = {target: told for each in DISTRIBUTIONS for target, told in read(each).items()}


def test_each_call_is_one_that_the_release_takes() -> None:
    assert KNOWN.keys() == CALLS.keys()
    wrong = {target: refusal(KNOWN[target], given) for target, given in CALLS.items()}
    assert {target: why for target, why in wrong.items() if why} == {}


def test_our_code_has_each_name_that_is_listed() -> None:
    files = [path for folder in ("meshrl", "backends", "examples/sandboxes") for path in (ROOT / folder).rglob("*.py")]
    code = {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}
    listed = {name for target, given in CALLS.items() for name in (target.rpartition(".")[2], *given.keywords)}
    assert listed <= code


def test_the_committed_signatures_are_those_of_the_releases_that_are_here() -> None:
    """`python -m tests.contracts.renew --download` brings the others."""
    here = [(each, root) for each in DISTRIBUTIONS if (root := each.root())]
    assert {each.title: real(each, root) for each, root in here} == {each.title: read(each) for each, _ in here}
    assert {path.stem for path in SIGNATURES.iterdir()} == {each.title for each in DISTRIBUTIONS}
    pinned = "".join(path.read_text() for path in ROOT.glob("requirements*.txt")).split()
    assert {f"{each.name}=={each.version}" for each in DISTRIBUTIONS if each.environment} <= {*pinned}


def test_the_stand_in_for_transformer_engine_has_its_signatures() -> None:
    for target in (each for each in CALLS if each.startswith("transformer_engine.")):
        name = target.partition(".pytorch.module.")[2].partition(".")[2]
        assert signature(ROOT / "tests/backends", f"engine_standin.{name}", ()) == KNOWN[target]
