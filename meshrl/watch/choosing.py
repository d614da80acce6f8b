"""Which run to watch: one by its name, begun or not, or the newest."""

from pathlib import Path

from meshrl.errors import ConfigError
from meshrl.report import FILES, find_run

_RUNS = Path("runs")


def run_to_watch(name: str | None) -> tuple[Path, str]:
    """A run's folder, and what to say of it: that of this name, or the newest under runs/.

    A run that is not there is waited for. ConfigError where two runs may be meant, and where none is named or there.
    """
    if name is None:
        runs = [each for each in _RUNS.glob("[!.]*") if each.is_dir() and _changed(each)]
        if not runs:
            raise ConfigError(f"there are no runs under {_RUNS.resolve()}: name the one that will begin, or a folder")
        newest = max(runs, key=_changed)
        return newest, f"the newest run is {newest}"
    try:
        return find_run(name), ""
    except ConfigError as error:
        is_path = name.startswith((".", "/")) or Path(name).parts[:1] == _RUNS.parts
        folder = Path(name) if is_path else _RUNS / name
        if _changed(folder):
            raise
        return folder, f"{error}; waiting for {folder} to begin"


def _changed(folder: Path) -> float:
    """When a run last wrote into it, in seconds since 1970; 0 where none did."""
    written = [folder / file for file in FILES[1:]]
    return max((file.stat().st_mtime for file in written if file.is_file()), default=0.0)
