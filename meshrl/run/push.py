"""Upload a run's model to the hub, with a card that says how it was made."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final, cast

import tomli_w

from meshrl.config import Table, load_toml, validate
from meshrl.errors import ConfigError
from meshrl.hub import Repository, create
from meshrl.observe import table_of
from meshrl.roles import PolicyConfig
from meshrl.run.artifacts import newest_model, summary_of

_MEASURES: Final = ("reward", "reward_sampled", "exact_match", "exact_match_sampled")


async def push(run: Path, name: str, *, public: bool = False) -> str:
    """Upload a run's newest model to the repository `ORG/NAME`, private unless `public`. Returns its address.

    Adapters are merged into their model. Raises ConfigError if the run has no model, and ModelError if the hub refuses
    it.
    """
    table = load_toml(run / "config.toml")
    policy = validate(PolicyConfig, table_of(table, "policy"), run / "config.toml")
    if (found := Repository.of(name)) is None or found.revision:
        raise ConfigError(f"{name!r} is not a name on the hub: write ORG/NAME")
    with tempfile.TemporaryDirectory(prefix="meshrl-push-") as scratch:
        source, folder = await newest_model(run, policy, Path(scratch))
        staged = Path(scratch, "staged")
        shutil.copytree(folder, staged, copy_function=os.symlink)
        (staged / "README.md").write_text(_card(name, table, summary_of(run)), "utf-8")
        return create(name, staged, public=public, message=f"{run.name}/{source.name}, by meshrl {version('meshrl')}")


def _card(name: str, table: Table, summary: Mapping[str, object]) -> str:
    """The text of README.md: front matter for the hub, then a description."""
    algorithm, base = Path(str(table["algorithm"])).stem, table_of(table, "policy").get("model")
    source = str(table_of(table, "task").get("source", ""))
    judged = table_of(table, "reward").get("function")
    begun = Repository.of(base) if isinstance(base, str) else None
    head = ["pipeline_tag: text-generation", f"tags: [meshrl, {algorithm}]"]
    head += [f"base_model: {begun.name}"] if begun else []
    head += [f"datasets: [{source.removeprefix('hf:').partition('@')[0]}]"] if source.startswith("hf:") else []
    told = [f"Trained from {f'`{_plain(base)}`' if isinstance(base, str) else 'a new, small model'}"]
    told += [f"by `{algorithm}` with meshrl {version('meshrl')}"]
    told += [f"on `{_plain(source)}`"] if source else []
    told += [f"for the reward `{_plain(judged)}`"] if judged else []
    told += [f"in {summary['steps']} steps"] if "steps" in summary else []
    settings = tomli_w.dumps({key: _shown(value) for key, value in table.items() if key != "run"}).strip()
    return "\n".join(
        [
            *("---", *head, "---", "", f"# {name.partition('/')[2]}", "", f"{' '.join(told)}.", ""),
            *_measures(summary),
            *("`meshrl run` of this configuration made it:", "", "```toml", settings, "```", ""),
        ]
    )


def _measures(summary: Mapping[str, object]) -> list[str]:
    found = [each for each in _MEASURES if f"{each}_before" in summary and f"{each}_after" in summary]
    if not found:
        return []
    rows = [f"| {each} | {summary[f'{each}_before']:.3f} | {summary[f'{each}_after']:.3f} |" for each in found]
    return ["On prompts that were held out:", "", "| measure | before | after |", "|---|---|---|", *rows, ""]


def _shown(value: object) -> object:
    """Remove folders of this machine from a value."""
    if isinstance(value, Mapping):
        return {key: _shown(each) for key, each in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list):
        return [_shown(each) for each in cast("list[object]", value)]
    return _plain(value) if isinstance(value, str) else value


def _plain(text: object) -> str:
    """Reduce a path to its name."""
    path, colon, rest = str(text).partition(":")
    return f"{Path(path).name}{colon}{rest}" if Path(path).is_absolute() else str(text)
