"""`kvstrata store serve`. Imports of what it runs happen when it runs: help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.errors import KVStrataError


def store_serve_command(
    backend: Annotated[str, typer.Option(metavar="NAME", help="mooncake, memcache or local.")],
    size_gb: Annotated[
        float, typer.Option("--size-gb", metavar="GB", min=1e-3, help="Memory of the store.")
    ] = 1.0,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address of this machine that servers listen on and are found."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="N",
            help="Mooncake's master (default 50051), MemCache's MetaService (default 5000).",
            show_default=False,
        ),
    ] = None,
    second_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="N",
            help="Mooncake's client on this machine (default 50052), MemCache's config store (default 6000).",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="The servers' own metrics; 0: any.")
    ] = 0,
    protocol: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How bytes travel, as in store_protocol.", show_default=False),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of a local store.", show_default=False),
    ] = None,
    log_dir: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="Where each server's output goes.")
    ] = Path("build/store"),
    start_deadline: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest time a server may take to serve.")
    ] = 60.0,
) -> None:
    """Run what a store's backend needs on this machine, and print what engines are to be started with.

    The JSON for --kv-transfer-config comes on standard output, everything else on standard error. Servers end
    with Ctrl-C or SIGTERM, and when one of them ends: then the exit code is 1, and the last lines of its log
    are printed. A local store needs no server: it is made, and the command ends.

    Example: kvstrata store serve --backend mooncake --size-gb 4
    """
    from kvstrata.serve_store.run import ServeOptions, serve_store

    options = ServeOptions(
        backend=backend,
        size_gb=size_gb,
        host=host,
        port=port,
        second_port=second_port,
        metrics_port=metrics_port,
        protocol=protocol,
        path=path,
        log_dir=log_dir,
        start_deadline_s=start_deadline,
    )
    try:
        raise typer.Exit(serve_store(options))
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error
