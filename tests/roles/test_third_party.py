from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from meshrl import Policy, PolicyConfig, Run, RunConfig
from meshrl.config import Config, load_toml, validate
from meshrl.errors import ConfigError, RankFailed

FILES = {
    "mine-1.0.dist-info/METADATA": "Name: mine\nVersion: 1.0\n",
    "mine-1.0.dist-info/entry_points.txt": "[meshrl.backends]\nmine = meshrl_mine\n",
    "meshrl_mine/__init__.py": """
ROLES = {"Policy": "meshrl_mine.policy:MinePolicy"}
OPTIONS = {"Policy": "meshrl_mine.options:MineConfig"}
MODELS = "ignored"
""",
    "meshrl_mine/options.py": """
from pydantic import Field
from meshrl.roles import BackendOptions

class MineConfig(BackendOptions):
    speed: int = Field(default=1, gt=0)
    places: tuple[str, ...] = ()
""",
    "meshrl_mine/policy.py": """
from meshrl import PolicyConfig
from meshrl.roles import options_of
from meshrl.testing import FakePolicy
from meshrl_mine.options import MineConfig

class MinePolicy(FakePolicy):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        raise RuntimeError(repr(options_of(config, MineConfig)))
""",
}


class File(Config):
    policy: PolicyConfig


def install(files: Mapping[str, str], site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, "utf-8")
    monkeypatch.syspath_prepend(site)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(FILES, tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)


def read(text: str, *overrides: str) -> PolicyConfig:
    path = Path("x.toml")
    path.write_text(f"[policy]\nmodel = 'none'\nbackend = 'mine'\n{text}", "utf-8")
    return validate(File, load_toml(path, overrides), path, overrides).policy


def own(config: PolicyConfig) -> dict[str, object]:
    return cast("dict[str, object]", config.model_dump(mode="json")["mine"])


def test_a_file_holds_its_options_and_the_resolved_configuration_too() -> None:
    assert own(read("[policy.mine]\nspeed = 3\nplaces = ['a']")) == {"speed": 3, "places": ["a"]}
    assert own(read("", "policy.mine.speed=4")) == {"speed": 4, "places": []}
    assert own(read("")) == {"speed": 1, "places": []}


MISTAKES: list[tuple[str, tuple[str, ...], str]] = [
    ("[policy.mine]\nsped = 3", (), "x.toml: policy.mine.sped: no such key; did you mean policy.mine.speed?"),
    ("", ("policy.mine.sped=3",), "command line: policy.mine.sped: no such key; did you mean policy.mine.speed?"),
    ("", ("policy.mine.speed=0",), "command line: policy.mine.speed = 0: must be greater than 0"),
    ("", ("policy.mine.speed='3'",), "command line: policy.mine.speed = '3': must be a whole number"),
    ("mine = 3", (), "x.toml: policy.mine = 3: must be a table"),
    ("[policy.min]\nspeed = 3", (), "x.toml: policy.min: no such key; did you mean policy.mine?"),
]


def test_a_mistake_in_them_is_told_as_any_other() -> None:
    for text, overrides, expected in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            read(text, *overrides)
        assert str(caught.value) == expected


async def test_a_rank_has_them_as_they_are_typed() -> None:
    async with Run(RunConfig()) as run:
        with pytest.raises(RankFailed, match=r"RuntimeError: MineConfig\(speed=3, places=\('a',\)\)"):
            await run.spawn(Policy, read("[policy.mine]\nspeed = 3\nplaces = ['a']"))


def test_tables_for_other_backends_stay_readable() -> None:
    text = "[policy.megatron]\nexperts = 2\n[policy.fsdp]\nreplicate = 2"
    dumped = read(text).model_dump()
    assert dumped["megatron"]["experts"] == dumped["fsdp"]["replicate"] == 2
    assert getattr(read(text), "fsdp").replicate == 2  # noqa: B009 -- no checker knows of it
