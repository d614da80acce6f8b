"""The reference of the command line, of the commands that typer has."""

import inspect
import re
from pathlib import Path
from typing import Any, cast

import typer

from meshrl.cli import app

PAGE = "reference/command-line.md"
_KINDS = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def pages() -> dict[str, str]:
    """The text of the page, by its path in the site."""
    group: Any = typer.main.get_command(app)
    commands = cast("dict[str, Any]", group.commands)
    head = """# Command line

Look up any command, its arguments and its options. `meshrl COMMAND --help` prints the same in a terminal. A mistake of
yours ends a command with one message and the exit status 1. An interrupted run ends with 130, a terminated one with
143.

| Command | What it does |
|---|---|
"""
    rows = [f"| [`{name}`](#meshrl-{name}) | {_first(command)} |" for name, command in commands.items()]
    return {PAGE: head + "\n".join(rows) + "\n" + "".join(_command(name, each) for name, each in commands.items())}


def _first(command: Any) -> str:
    return re.sub(r"\s+", " ", (command.help or "").partition("\n\n")[0])


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join(["meshrl", name, *(["[OPTIONS]"] if options else []), *(_named(each) for each in arguments)])
    parts = [f"\n## meshrl {name}\n\n```sh\n{usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n\n"]
    parts += [f"`{_named(each)}`\n:   {_help(each)}\n\n" for each in [*arguments, *options]]
    return "".join(parts)


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = parameter.metavar or parameter.name.upper()
        return shown if parameter.required or shown.startswith("[") else f"[{shown}]"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return (
        names if parameter.is_flag else f"{names} {parameter.metavar or _KINDS[parameter.type_descriptor.annotation]}"
    )


def _help(parameter: Any) -> str:
    default = parameter.default
    shown = isinstance(default, int | float | str) and not isinstance(default, bool) and default != ""
    return (parameter.help or "") + (f" Default: `{default}`." if shown else "")
