"""The rooms that the README and the tour print are those of the code."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_architecture import ROOMS

ROOT = Path(__file__).parents[1]


def house() -> ModuleType:
    """The script that makes them."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_a_page_has_the_rooms_as_their_docstrings_say(page: str) -> None:
    assert house().written(ROOT / page) == (ROOT / page).read_text("utf-8"), "run python docs/house.py"


def test_a_room_lies_above_all_that_it_imports_from() -> None:
    level = {room: number for number, rooms in enumerate(house().ROOMS) for room in rooms}
    assert level.keys() == ROOMS.keys() - {"cli"}
    for room, allowed in ROOMS.items():
        assert all(level[other] < level.get(room, len(level)) for other in allowed.split()), room
