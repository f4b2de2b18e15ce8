"""`kvstrata store stat` and `kvstrata store clear`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.errors import KVStrataError
from kvstrata.store.base import StoreStatistics
from kvstrata.store.local import LocalStore
from kvstrata.store.registry import default_store_path

app = typer.Typer(
    name="store",
    help="Look at, or empty, the host KV store that engines share.\n\nExample: kvstrata store stat",
    no_args_is_help=True,
)

PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path",
        metavar="DIR",
        help="The store's directory, as in store_path. Default: this user's, in /dev/shm.",
        show_default=False,
    ),
]


@app.command()
def stat(
    path: PathOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what a store holds and how it is used.

    Example: kvstrata store stat --json
    """
    path = path or default_store_path()
    with _friendly_errors(), _attached(path) as store:
        statistics = store.statistics()
    if as_json:
        typer.echo(json.dumps(asdict(statistics), indent=2))
    else:
        Console().print(_table(path, statistics))


@app.command()
def clear(
    path: PathOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Drop blocks that are being read, too.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the store's files and free its memory; also if corrupt.")
    ] = False,
) -> None:
    """Drop everything in a store. Engines compute it again; running ones may keep using the store.

    Example: kvstrata store clear --yes
    """
    path = path or default_store_path()
    question = f"Delete the store in {path}?" if delete else f"Drop everything in the store in {path}?"
    if not yes and not typer.confirm(question):
        typer.echo("Nothing was changed.")
        raise typer.Exit(code=1)
    with _friendly_errors():
        if delete:
            LocalStore.delete(path)
            typer.echo(f"Deleted the store in {path}.")
            return
        with _attached(path) as store:
            dropped = store.clear(force=force)
            kept = store.statistics().objects
    typer.echo(f"Dropped {dropped} blocks.")
    if kept:
        typer.echo(f"{kept} blocks are being read and stay; --force drops them, too.")


@contextmanager
def _attached(path: Path) -> Iterator[LocalStore]:
    store = LocalStore.attach(path)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _friendly_errors() -> Iterator[None]:
    try:
        yield
    except KVStrataError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(code=2) from error


def _table(path: Path, statistics: StoreStatistics) -> Table:
    table = Table(title=f"Store in {path}")
    table.add_column("what")
    table.add_column("value", justify="right")
    asked = statistics.hits + statistics.misses
    for name, value in asdict(statistics).items():
        if name.endswith("_bytes"):
            table.add_row(name.removesuffix("_bytes").replace("_", " "), f"{value / (1 << 20):,.1f} MiB")
        else:
            table.add_row(name.replace("_", " "), f"{value:,}")
    table.add_row("hit rate", f"{statistics.hits / asked:.1%}" if asked else "nothing was asked for")
    return table
