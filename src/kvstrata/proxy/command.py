"""`kvstrata proxy`. Imports of the servers happen when it runs: help answers at once."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.errors import ConfigurationError, KVStrataError

if TYPE_CHECKING:
    from kvstrata.proxy.options import ProxyOptions

_WILDCARDS = ("", "0.0.0.0", "::")
_GRACE_S = 5


def proxy_command(
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="URL", help="A decode engine; repeat for more.")
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            "--prefill",
            metavar="URL",
            help="A prefill engine; repeat for more. Without any, decode computes the prompts.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0: any, and it is printed.")
    ] = 8000,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The engines' remote_secret. Better in KVSTRATA_REMOTE_SECRET, which ps does not show. "
            "Default on loopback: the file of the user that the engines read, too.",
            show_default=False,
        ),
    ] = None,
    metaserver_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where decode engines reach this proxy. Default: http://ADDRESS:N of what it listens on.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest silence of an engine before and between tokens."),
    ] = 600.0,
    answer_deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for an answer that is not streamed.")
    ] = 3600.0,
    connect_deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest wait for a connection to an engine.")
    ] = 5.0,
    health_interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often an engine's health is checked.")
    ] = 2.0,
    max_attempts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Attempts per prompt; the last computes it at decode."),
    ] = 4,
    max_body_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Longest request body that is taken.")
    ] = 32,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve OpenAI's API in front of prefill and decode engines.

    A request goes to the least busy decode engine; when that asks for the prompt's KV, the least busy prefill
    engine computes it. Engines that fail are taken out until they are healthy again; requests that have not
    begun to be answered are tried elsewhere. GET /health is 200 while an engine of each kind is ready, and
    GET /metrics is for Prometheus.

    Example: kvstrata proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
    """
    from kvstrata.proxy.options import METASERVER_PATH, ProxyOptions
    from kvstrata.remote.protocol.secret import load_secret

    try:
        with closing(_listen(host, port)) as listener:
            url = _own_url(host, listener.getsockname()[1], metaserver_url)
            options = ProxyOptions(
                prefill=tuple(prefill or ()),
                decode=tuple(decode),
                secret=load_secret(secret, host=host, knob="--secret"),
                metaserver_url=metaserver_url or url + METASERVER_PATH,
                deadline_s=deadline,
                answer_deadline_s=answer_deadline,
                connect_deadline_s=connect_deadline,
                health_interval_s=health_interval,
                most_attempts=max_attempts,
                max_body_bytes=max_body_mib << 20,
            )
            _serve(options, listener, log_level)
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigurationError(f"--host={host} --port={port}: cannot listen there ({error})") from error
    listener.setblocking(False)
    return listener


def _own_url(host: str, port: int, metaserver_url: str | None) -> str:
    if host in _WILDCARDS and metaserver_url is None:
        raise ConfigurationError(
            f"--host={host} is every address of this machine; say with --metaserver-url which of them decode "
            f"engines reach, such as http://10.0.0.1:{port}/v1/metaserver"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve(options: ProxyOptions, listener: socket.socket, log_level: str) -> None:
    import asyncio
    import logging

    import uvicorn

    from kvstrata.proxy.app import create_app

    levels = ("debug", "info", "warning", "error")
    if log_level not in levels:
        raise ConfigurationError(f"--log-level={log_level}: set one of {', '.join(levels)}")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)  # a line a request is not for people
    address = listener.getsockname()
    typer.echo(f"kvstrata proxy: listening on {address[0]} port {address[1]}")
    app = create_app(options)

    class Server(uvicorn.Server):
        """Lets requests go on for a while when it is told to end, then has them say so to their clients."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(_GRACE_S, app.state.engines.ending.set)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2 * _GRACE_S,
        timeout_keep_alive=75,
    )
    Server(config).run(sockets=[listener])
