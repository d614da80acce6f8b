"""Choose the run to watch: by its name, even before it starts, or the newest."""

from contextlib import suppress
from pathlib import Path

from meshrl.errors import ConfigError
from meshrl.observe.reading import FILES, find_run

_RUNS = Path("runs")


def run_to_watch(name: str | None) -> tuple[Path, str]:
    """Return the folder of this run, or of the newest under runs/, and a message about it.

    A named run need not exist yet. Raises ConfigError if the name fits two runs, or if no run is named and none exists.
    """
    if name is None:
        newest = max(_RUNS.glob("[!.]*"), key=_changed, default=_RUNS)
        if not _changed(newest):
            raise ConfigError(f"there are no runs under {_RUNS.resolve()}: name the run that will start, or a folder")
        return newest, f"the newest run is {newest}"
    try:
        return find_run(name), ""
    except ConfigError as error:
        is_path = name.startswith((".", "/")) or Path(name).parts[:1] == _RUNS.parts
        folder = Path(name) if is_path else _RUNS / name
        if _changed(folder):
            raise
        return folder, f"{error}; waiting for {folder} to start"


def _changed(folder: Path) -> float:
    """When a run last wrote into the folder, in seconds since 1970. 0 if none did."""
    times = [0.0]
    for file in FILES[1:]:
        with suppress(OSError):  # a run that begins renames another's folder
            times.append((folder / file).stat().st_mtime)
    return max(times)
