"""Render docs/cli.md from the commands themselves: `python -m kvstrata.cli_docs > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from kvstrata.cli import app

_HEAD = """\
# The `kvstrata` command

<!-- Rendered by `python -m kvstrata.cli_docs`; change the help in src/kvstrata/ instead of this file. -->

A server does not need it: it is vLLM's own, started with `--kv-transfer-config` or `--additional-config`
(see the [README](../README.md)). `serve-pd` and `proxy` are for prefill and decode on engines of their own.
Every command answers `--help`.
"""


def render() -> str:
    """Return the whole page."""
    sections = [_section(path, command) for path, command in commands()]
    return "\n".join([_HEAD, *sections])


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, as ("kvstrata store stat", command), in the order of help."""
    yield from _leaves("kvstrata", typer.main.get_command(app))


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if not children:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(f"{path} {name}", child)


def _section(path: str, command: Any) -> str:
    rows = ["| option | default | what it does |", "|---|---|---|"]
    rows += [_row(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join((f"## `{path}`", "", inspect.cleandoc(command.help or ""), "", *rows, ""))


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        needed = "required" if parameter.required else ""
        more = "" if parameter.nargs == 1 else "..."
        return f"| `{parameter.metavar}{more}` | {needed} | {parameter.help} |"
    names = ", ".join(parameter.opts)
    metavar = "" if parameter.is_flag else f" {parameter.metavar or parameter.display_name_raw.upper()}"
    shown = parameter.default
    default = "required" if parameter.required else "" if shown is None or parameter.is_flag else f"`{shown}`"
    return f"| `{names}{metavar}` | {default} | {parameter.help} |"


if __name__ == "__main__":
    print(render(), end="")
