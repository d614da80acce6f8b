"""The command line application, and arguments that several commands share."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer

from meshrl.errors import ConfigError

app: typer.Typer = typer.Typer(
    help="Reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshrl {version('meshrl')}")
        raise typer.Exit


RolloutSeconds = Annotated[
    float | None, typer.Option(help="Without --from: seconds that one rank takes for a step's rollouts.")
]
TrainSeconds = Annotated[
    float | None, typer.Option(help="Without --from: seconds that one rank takes to update on them.")
]
ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A TOML file, or the name of a shipped configuration (see `meshrl configs`)."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override, such as policy.optimizer.lr=1e-4 steps=20."),
]


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The file to write. Default: a file in the run's folder.")
]


WITH_SETTINGS: Final = {"ignore_unknown_options": True}
"""For commands that take KEY=VALUE: an unknown option reaches `settings`, which explains the mistake."""


def settings(config: str, overrides: list[str] | None) -> list[str]:
    """Return the overrides. ConfigError if a key is written as an option, such as `--steps 3`."""
    given = [config, *(overrides or [])]
    for at, argument in enumerate(given):
        if at and not argument.startswith("-") and "=" not in argument:
            _told_to_join(argument, given[at + 1 : at + 2])
        if argument.startswith("-"):
            key, equals, value = argument.lstrip("-").partition("=")
            beside = given[at + 1 : at + 2] or ["true"]
            told = value if equals else "true" if beside[0].startswith("-") else beside[0]
            raise ConfigError(f"{argument}: keys are set without dashes. Write {key.replace('-', '_')}={told}")
    return given[1:]


def _told_to_join(key: str, beside: list[str]) -> None:
    """ConfigError if a key and its value are two arguments, such as `steps 3`."""
    if beside and "=" not in beside[0] and not beside[0].startswith("-"):
        raise ConfigError(f"{key} {beside[0]}: a key and its value are one argument. Write {key}={beside[0]}")


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def write(file: Path, content: bytes) -> None:
    """Write a file that the user asked for, and say so. ConfigError if it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {file}")
