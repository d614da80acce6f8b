"""Calls into packages that only a GPU runs are those that these packages take: by their own sources, read as text.

What is asked of them is found in our code and listed in `table.toml`. What they take is committed in `signatures/`, so
that no network is needed, and compared with the release itself where its sources are here.
"""

from tests.gpu_contracts.contracts import SIGNATURES, contracts, read, real, refusal, target_of
from tests.gpu_contracts.scanning import NOT_THEIRS, OBJECTS, ROOT, found, listed
from tests.gpu_contracts.sources import DISTRIBUTIONS, signature

OF = {each.name: each for each in DISTRIBUTIONS}


def test_every_use_is_listed_and_nothing_else() -> None:
    known = {target for each in DISTRIBUTIONS for target in read(each)}
    unlisted = [
        f"{use.file}:{use.line}: {use.key}"
        for use in found()
        if (target_of(use.key) not in known if target_of(use.key) else listed(use.key) is None)
    ]
    assert unlisted == []
    assert known - contracts().keys() == set()
    assert {*OBJECTS, *NOT_THEIRS} - {listed(use.key) for use in found()} == set()


def test_each_call_is_one_that_the_release_takes() -> None:
    signatures = {target: told for each in DISTRIBUTIONS for target, told in read(each).items()}
    wrong = [
        f"{place}: {target}{signatures[target]} {why}"
        for target, asked in contracts().items()
        for place, given in asked
        if (why := refusal(signatures[target], given))
    ]
    assert wrong == []


def test_the_committed_signatures_are_those_of_the_releases_that_are_here() -> None:
    """`python -m tests.gpu_contracts.renew --download` brings the others."""
    here = [(each, root) for each in DISTRIBUTIONS if (root := each.root())]
    assert {each.title: real(each, root) for each, root in here} == {each.title: read(each) for each, _ in here}
    assert {path.stem for path in SIGNATURES.iterdir()} == {each.title for each in DISTRIBUTIONS}
    pinned = "".join(path.read_text() for path in ROOT.glob("requirements*.txt")).split()
    assert {f"{each.name}=={each.version}" for each in DISTRIBUTIONS if each.environment} <= {*pinned}


def test_the_stand_in_for_transformer_engine_has_its_signatures() -> None:
    for target, told in read(OF["transformer-engine"]).items():
        name = target.partition(".pytorch.module.")[2].partition(".")[2]
        assert signature(ROOT / "tests/backends", f"engine_standin.{name}", ()) == told
