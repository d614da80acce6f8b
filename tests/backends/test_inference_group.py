"""Which GPUs an engine is given, and which ranks may share one."""

import pytest

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_inference.group import Place, gather_gpus, together


def test_an_engine_has_the_gpus_of_its_ranks_in_their_order() -> None:
    assert together({0: Place("a", ("3",)), 1: Place("a", ("0",))}) == ["3", "0"]
    assert together({0: Place("a", ()), 1: Place("a", ())}) == []


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (Place("a 1", ("0",)), Place("b 1", ("0",)), "rank 2 is on a; rank 5 is on b: use a smaller tp"),
        (Place("a 1", ("0",)), Place("a 2", ("0",)), "on one machine"),
        (Place("a", ("0",)), Place("a", ("0",)), "rank 2 has 0; rank 5 has 0: set gpus = 1"),
        (Place("a", ("0",)), Place("a", ()), "rank 2 has 0; rank 5 has none: set gpus = 1"),
    ],
    ids=["machines", "machines of one name", "a share of one GPU", "one without"],
)
def test_ranks_that_cannot_share_an_engine_are_told(one: Place, other: Place, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        together({2: one, 5: other})


def test_threads_share_one_engine_at_most() -> None:
    assert gather_gpus(Rank(1, 2, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 2})) == []
    with pytest.raises(ConfigError, match=r"2 engines of 2 ranks each.*set run.engine = 'ray'"):
        gather_gpus(Rank(0, 4, {"dp": 0, "tp": 0}, {"dp": 2, "tp": 2}))
