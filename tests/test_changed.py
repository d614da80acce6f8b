import re

from tests.changed import ROOT, needed_parts, read_parts


def test_each_folder_of_the_product_has_its_parts_and_each_part_is_there() -> None:
    parts = read_parts()
    packages = [*(ROOT / "meshrl").glob("*/__init__.py"), *(ROOT / "backends").glob("*/__init__.py")]
    folders = {str(path.parent.relative_to(ROOT)) for path in packages} | {"algorithms", "configs", "examples", "bench"}
    targets = set(re.findall(r"test-([\w-]+)", (ROOT / "Makefile").read_text("utf-8")))
    named = {part for each in parts.values() for part in each}
    assert not folders - parts.keys() - {"meshrl/config"}, "folders that tests/parts.toml has no line for"
    assert not [folder for folder in parts if not (ROOT / folder).exists()]
    assert not [part for part in named if not (ROOT / part).is_dir() and part not in targets]


def test_a_change_needs_the_parts_of_the_longest_folder_that_it_lies_in() -> None:
    parts = {"a": ["tests/x", "vllm"], "a/b": ["attack"]}
    assert needed_parts(["a/c.py"], parts) == ["tests/x", "vllm"]
    assert needed_parts(["a/b/c.py", "tests/data/test_batch.py", "README.md"], parts) == ["attack", "tests/data"]
    assert needed_parts(["a/c.py", "Makefile"], parts) is None
    assert needed_parts(["README.md"], parts) == []
