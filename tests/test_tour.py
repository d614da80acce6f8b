"""The rooms that the tour prints are those of the code."""

from pathlib import Path
from runpy import run_path

from tests.test_architecture import ROOMS

ROOT = Path(__file__).parents[1]
HOUSE = run_path(str(ROOT / "docs" / "house.py"))
"""The script that makes them."""


def test_the_tour_has_the_rooms_as_their_docstrings_say_and_the_picture_their_imports() -> None:
    assert HOUSE["written"]() == HOUSE["PAGE"].read_text("utf-8"), "run python docs/house.py"
    assert HOUSE["picture"]() == HOUSE["PICTURE"].read_text("utf-8"), "run python docs/house.py"


def test_a_room_lies_above_all_that_it_imports_from() -> None:
    level = {room: number for number, rooms in enumerate(HOUSE["ROOMS"]) for room in rooms}
    assert level.keys() == {*ROOMS, "config"}
    for room, allowed in ROOMS.items():
        assert all(level[other] < level[room] for other in allowed.split()), room
