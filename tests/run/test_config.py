from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from meshrl import AlgorithmConfig, CriticConfig, RewardConfig, RewardModelConfig, RunConfig, SamplerConfig
from meshrl import PolicyConfig as PolicyTable
from meshrl.config import Config, PathIn, load_toml, validate
from meshrl.errors import ConfigError
from meshrl.run.config import MeshConfig


class Optimizer(Config):
    lr: float = Field(default=1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 0
    total: int | None = None

    @model_validator(mode="after")
    def _warmup_within_total(self) -> Self:
        if self.total is not None and self.warmup > self.total:
            raise ValueError(f"warmup = {self.warmup} is more than total = {self.total}")
        return self


class NewModel(Config):
    characters: str
    hidden: int = Field(default=64, gt=0)


class PolicyConfig(Config):
    model: str | NewModel
    optimizer: Optimizer = Optimizer()


class Whole(Config):
    policy: PolicyConfig
    steps: int = 3
    greedy: bool = False
    seeds: tuple[int, ...] = ()
    meshes: dict[str, Optimizer] = Field(default={})
    batch: Literal["auto"] | int = "auto"


MODEL = "[policy]\nmodel = 'folder'\n"


def read(folder: Path, text: str, *overrides: str, form: type[Config] = Whole) -> Any:
    path = folder / "x.toml"
    path.write_text(text, "utf-8")
    return validate(form, load_toml(path, overrides), "x.toml", overrides)


def mistakes(folder: Path, text: str, *overrides: str, form: type[Config] = Whole) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *overrides, form=form)
    lines = str(caught.value).splitlines()
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} mistakes:"
        lines = [line.removeprefix("  ") for line in lines[1:]]
    return lines


def test_a_file_becomes_a_frozen_model(tmp_path: Path) -> None:
    assert read(tmp_path, "[policy.model]\ncharacters = 'abc'\n").policy.model == NewModel(characters="abc")
    whole = read(tmp_path, "seeds = [1, 2]\n" + MODEL + "optimizer = { lr = 1, betas = [0.5, 1] }\n")
    assert whole.policy.model == "folder"
    assert whole.policy.optimizer == Optimizer(lr=1.0, betas=(0.5, 1.0))
    assert whole.seeds == (1, 2)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(whole, "steps", 4)  # noqa: B010 -- a checker would refuse the assignment


def test_an_override_is_toml_or_else_text_and_the_last_one_wins(tmp_path: Path) -> None:
    table: dict[str, object] = {
        "steps = 7": 7,
        "greedy=true": True,
        "batch=auto": "auto",
        "batch='auto'": "auto",
        "seeds=[3, 4]": (3, 4),
        "policy.model=other/folder": "other/folder",
        "policy.optimizer.lr=1e-3": 1e-3,
        "policy.model={characters='xyz'}": NewModel(characters="xyz"),
        "meshes.big.lr=1": 1.0,
    }
    for override, value in table.items():
        found: object = read(tmp_path, MODEL, override)
        for part in override.partition("=")[0].strip().split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert found == value, override
    assert read(tmp_path, "steps = 1\n" + MODEL, "steps=2", "steps=3").steps == 3


def test_a_mistake_in_an_override_is_told_with_its_place_and_what_is_expected(tmp_path: Path) -> None:
    no_override = "is not an override: write key.sub=value, such as policy.optimizer.lr=1e-4"
    table = {
        "steps=true": "steps = true: must be a whole number",
        "greedy=yes": "greedy = 'yes': must be true or false",
        "batch=big": "batch = 'big': must be 'auto', or must be a whole number",
        "seeds=[1, 'b']": "seeds[1] = 'b': must be a whole number",
        "policy.optimizer.betas=[1]": "policy.optimizer.betas[1]: is missing",
        "policy.optimizer={warmup=3, total=2}": "policy.optimizer: warmup = 3 is more than total = 2",
        **{each: f"{each!r} {no_override}" for each in ("steps", "=3", "policy..lr=1", ".steps=1", "")},
    }
    assert {override: mistakes(tmp_path, MODEL, override) for override in table} == {
        override: [f"command line: {told}"] for override, told in table.items()
    }
    (smuggled,) = mistakes(tmp_path, MODEL, "steps=1\ngreedy=true")
    assert "must be a whole number" in smuggled
    (long,) = mistakes(tmp_path, MODEL, f"steps={'x' * 500}")
    assert len(long) < 130, "a long value is cut"


class FunctionConfig(Config):
    backend: str = "function"
    function: str = "exact"

    @field_validator("backend")
    @classmethod
    def _calls(cls, backend: str) -> str:
        if backend == "torch":
            raise ValueError("holds a model")
        return backend


class JudgeConfig(Config):
    backend: str = "torch"
    model: str | NewModel
    optimizer: Optimizer = Optimizer()


class Rewarded(Config):
    reward: FunctionConfig | JudgeConfig = FunctionConfig()


def test_a_table_of_several_forms_is_judged_as_the_one_that_fits_best(tmp_path: Path) -> None:
    table = {
        "fnction = 'x'": ["reward.fnction: no such key; did you mean reward.function?"],
        "backend = 'torch'\nmodl = 'x'": [
            "reward.model: is missing",
            "reward.modl: no such key; did you mean reward.model?",
        ],
        "model.hidden = 3": ["reward.model.characters: is missing"],
        "model = 3": ["reward.model = 3: must be text in quotes, or must be a table"],
        "model = 'x'\noptimizer.lr = 0": ["reward.optimizer.lr = 0: must be greater than 0"],
    }
    assert {reward: mistakes(tmp_path, f"[reward]\n{reward}", form=Rewarded) for reward in table} == {
        reward: [f"x.toml: {line}" for line in told] for reward, told in table.items()
    }
    assert mistakes(tmp_path, "reward = 3", form=Rewarded) == ["x.toml: reward = 3: must be a table"]


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "stepps = 1\n[policy]\noptimizer = { lr = 0, warmup = 'x' }", "greedy=1")
    assert found == [
        "x.toml: policy.model: is missing",
        "x.toml: policy.optimizer.lr = 0: must be greater than 0",
        "x.toml: policy.optimizer.warmup = 'x': must be a whole number",
        "command line: greedy = 1: must be true or false",
        "x.toml: stepps: no such key; did you mean steps?",
    ]
    told = r"^mine.toml: meshes.main.gpu: no such key; did you mean meshes.main.gpus\?$"
    with pytest.raises(ConfigError, match=told):  # a default that follows from a mistake is none itself
        validate(RunConfig, {"meshes": {"main": {"gpu": 1}}}, "mine.toml")


class Trained(AlgorithmConfig):
    policy: PolicyTable
    critic: CriticConfig | None = None
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    judge: RewardModelConfig | None = None
    either: CriticConfig | RewardConfig | None = None


def test_a_role_without_a_model_has_the_policys_but_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.toml"
    monkeypatch.chdir("/")
    for reward, expected in {
        "": RewardConfig(),
        "model = 'judge'": RewardModelConfig(model="/judge"),
        "backend = 'fsdp'\nmodel = 'judge'": RewardModelConfig(backend="fsdp", model="/judge"),
    }.items():
        path.write_text(f"{MODEL}[sampler]\n[critic]\n[either]\n[reward]\n{reward}", "utf-8")
        trained = validate(Trained, load_toml(path), path)
        assert trained.critic == CriticConfig(model="/folder")
        assert trained.sampler == SamplerConfig(model="/folder")
        assert trained.reward == expected
        assert trained.either == RewardConfig()
    chats = ["policy.chat=true", "policy.chat_template_kwargs.enable_thinking=false", "critic.model='/other'"]
    chat = validate(Trained, load_toml(path, chats), path)
    assert chat.sampler.template == chat.policy.template == {"enable_thinking": False}
    assert chat.critic == CriticConfig(model="/other")
    for override, told in {
        "judge={}": "judge.model: is missing$",
        "policy.megatron.virtual_stages=0": "policy.megatron.virtual_stages = 0: must be greater than 0",
        "critic.megatron.virtual_stages=0": "critic.megatron.virtual_stages = 0: must be greater than 0",
        "reward={model={characters='abc'}}": "reward.model: a new model's rewards would be random",
    }.items():
        with pytest.raises(ConfigError, match=told):
            validate(Trained, load_toml(path, [override]), path)


class Located(Config):
    words: Annotated[str, PathIn("(.+)")]
    many: list[Annotated[str, PathIn(r"(.+\.txt)")]] = Field(default=[])
    by_name: dict[str, Annotated[str, PathIn(r"(.+\.txt)")] | int] = Field(default={})


def test_a_marked_key_holds_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    table = {"words": "words", "many": ["a.txt", "name"], "by_name": {"one": "../b.txt", "two": 2, "three": "/c.txt"}}
    read = validate(Located, table, tmp_path / "x.toml", ["many=[]"], tmp_path / "below")
    assert read == Located(
        words=f"{tmp_path}/below/words",
        many=["/a.txt", "name"],
        by_name={"one": f"{tmp_path}/b.txt", "two": 2, "three": "/c.txt"},
    )
    for name in ("\0", "x" * 5000):  # what no disk can hold is told by who reads it
        assert validate(Located, {"words": name}, "x.toml", folder=tmp_path).words.endswith(name)


def test_a_mesh_that_may_shrink_is_one_of_samplers() -> None:
    for table, told in (
        ({"ranks": 2, "min_ranks": 3}, "min_ranks = 3 is more than ranks = 2"),
        ({"ranks": 4, "min_ranks": 2, "axes": {"dp": 2, "tp": 2}}, "use the axis dp only"),
    ):
        with pytest.raises(ValidationError, match=told):
            MeshConfig.model_validate(table)
    mesh = MeshConfig(ranks=4, min_ranks=2)
    assert mesh.resources.min_ranks == 2
    mesh.check_takes(SamplerConfig(model="none"))
    with pytest.raises(ConfigError, match=r"the mesh 'main' has min_ranks = 2, and the Policy would lose a part"):
        mesh.check_takes(PolicyTable(model="none"))
