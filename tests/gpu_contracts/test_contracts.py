"""Calls into packages that only a GPU runs are those that these packages take: by their own sources, read as text.

What is asked of them is found in our code and listed in `table.toml`. What they take is committed in `signatures/`, so
that no network is needed, and compared with the release itself where its sources are here.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.gpu_contracts.contracts import SIGNATURES, contracts, read, real, refusal, target_of
from tests.gpu_contracts.scanning import NOT_THEIRS, OBJECTS, ROOT, TRANSFORMER_ENGINE, found, listed
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


CHANGES = [
    ("cu_seqlens_q", "offsets_q", "does not take cu_seqlens_q"),
    ("softmax_scale=None, ", "", "does not take softmax_scale"),
    ("max_seqlen_k", "max_seqlen_k, heads", "must be given heads"),
    ("q, k, v, ", "q, *, k, v, ", "takes 1 positional arguments and is given 3"),
]


def test_planted_changes_of_a_signature_and_a_rename_are_found(tmp_path: Path) -> None:
    distribution, target = OF["flash-attn"], "flash_attn.flash_attn_varlen_func"
    true = read(distribution)[target]
    (tmp_path / "flash_attn").mkdir()
    source = f"def flash_attn_varlen_func{true}: ...\n"
    place = tmp_path / "flash_attn/__init__.py"
    place.write_text(source)
    assert real(distribution, tmp_path) == read(distribution)
    for old, new, why in CHANGES:
        place.write_text(re.sub(rf"\b{re.escape(old)}", new, source, count=1))
        changed = real(distribution, tmp_path)[target]
        assert changed != true
        assert {refusal(changed, given) for _, given in contracts()[target]} == {why}
    place.write_text(source.replace("varlen", "packed"))
    with pytest.raises(LookupError, match=r"flash_attn/__init__\.py has no flash_attn_varlen_func"):
        real(distribution, tmp_path)


def test_megatron_asks_of_transformer_engine_what_is_listed() -> None:
    if (root := OF["megatron-core"].root()) is None:
        pytest.skip("this release of megatron-core is not here")
    megatron = ast.parse((root / "megatron/core/extensions/transformer_engine.py").read_text())
    classes = {node.name: node for node in megatron.body if isinstance(node, ast.ClassDef)}

    def given_by(owner: str, called: str) -> set[str]:
        calls = [node for node in ast.walk(classes[owner]) if isinstance(node, ast.Call)]
        (found,) = (call for call in calls if ast.unparse(call.func) == called)
        return {each.arg for each in found.keywords if each.arg}

    linear, forward, norm = ({*asked["keywords"]} for asked in TRANSFORMER_ENGINE.values())
    always = {"device", "params_dtype"}
    assert linear == given_by("TELinear", "super().__init__") | always | {"rng_tracker_name"}
    assert forward == given_by("TELinear", "super().forward")
    assert norm == given_by("TENorm", "te.pytorch.RMSNorm") | always


def test_the_stand_in_for_transformer_engine_has_its_signatures() -> None:
    for target, told in read(OF["transformer-engine"]).items():
        name = target.partition(".pytorch.module.")[2].partition(".")[2]
        assert signature(ROOT / "tests/backends", f"engine_standin.{name}", ()) == told
