"""What an engine's ranks share: which GPUs it is given, and memory that its process keeps mapped."""

from pathlib import Path

import pytest

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_inference.group import Place, gather_gpus, together
from meshrl_inference.mapped import mapped


def test_an_engine_has_the_gpus_of_its_ranks_in_their_order() -> None:
    assert together({0: Place("a", ("3",)), 1: Place("a", ("0",))}) == ["3", "0"]
    assert together({0: Place("a", ()), 1: Place("a", ())}) == []


def test_ranks_that_cannot_share_an_engine_are_told() -> None:
    for one, other, message in (
        (Place("a 1", ("0",)), Place("b 1", ("0",)), "rank 2 is on a; rank 5 is on b: use a smaller tp"),
        (Place("a 1", ("0",)), Place("a 2", ("0",)), "on one machine"),  # machines of one name
        (Place("a", ("0",)), Place("a", ("0",)), "rank 2 has 0; rank 5 has 0: set gpus = 1"),
        (Place("a", ("0",)), Place("a", ()), "rank 2 has 0; rank 5 has none: set gpus = 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            together({2: one, 5: other})
    assert gather_gpus(Rank(1, 2, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 2})) == []
    with pytest.raises(ConfigError, match=r"2 engines of 2 ranks each.*set run.engine = 'ray'"):
        gather_gpus(Rank(0, 4, {"dp": 0, "tp": 0}, {"dp": 2, "tp": 2}))


def test_memory_that_is_written_again_under_another_name_is_mapped_once_and_let_go_when_removed(tmp_path: Path) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    file = tmp_path / "one"
    file.write_bytes(b"old bytes")
    memory = mapped(str(file))
    assert memory[:] == b"old bytes"
    file = file.rename(tmp_path / "other")
    with file.open("r+b") as opened:
        opened.write(b"new bytes")
    assert mapped(str(file)) is memory
    assert memory[:] == b"new bytes"
    del memory
    for name in ("two", "three"):
        file.unlink()
        file = tmp_path / name
        file.write_bytes(b"bytes")
        mapped(str(file))
        assert maps() == 1
