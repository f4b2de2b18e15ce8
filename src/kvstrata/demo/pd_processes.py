"""What a deployment on this machine is made of: processes, and a relay that exchanges prompts."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvstrata.errors import DeadlineExceeded, KVStrataError
from kvstrata.serve_pd.children import ChildProcess, last_lines
from kvstrata.serve_pd.machine import free_port
from kvstrata.serve_pd.plan import Launch

STOP_DEADLINE_S = 20.0
RELAY_DEADLINE_S = 300.0
POLL_S = 0.05
HOST = "127.0.0.1"

MakeApp = Callable[[], Any]  # makes an ASGI application


class ServerProcess:
    """One running process of a launch."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process = ChildProcess(launch)

    def check(self) -> None:
        """Raise KVStrataError, with the end of its log, if the process has ended."""
        status = self._process.status()
        if status is not None:
            lines = "\n".join(last_lines(self._launch))
            raise KVStrataError(
                f"{self._launch.name} ended with status {status}; {self._launch.log} ends with:\n{lines}"
            )

    def end(self, how: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        self._process.end(how)

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.status() is not None


@contextmanager
def processes_of(launches: Sequence[Launch]) -> Iterator[list[ServerProcess]]:
    """Start every launch, with a new log; end all of them with the block, by force after a deadline."""
    processes: list[ServerProcess] = []
    try:
        for launch in launches:
            launch.log.unlink(missing_ok=True)
            processes.append(ServerProcess(launch))
        yield processes
    finally:
        for process in processes:
            process.end(signal.SIGTERM)
        ends_s = time.monotonic() + STOP_DEADLINE_S
        while not all(process.has_ended() for process in processes) and time.monotonic() < ends_s:
            time.sleep(POLL_S)  # processes that cannot call back
        for process in processes:
            process.end(signal.SIGKILL)  # what is left of it and its children


def proxy_in_front_of(proxy: Launch, prefill: str, decode: str) -> Launch:
    """Return another proxy like `proxy`, with these engines and a free port."""
    port = free_port(HOST)
    engines = ("--prefill", prefill, "--decode", decode)
    return replace(
        proxy,
        name="control-proxy",
        url=f"http://{HOST}:{port}",
        argv=(sys.executable, "-m", "kvstrata", "proxy", *engines, "--host", HOST, "--port", str(port)),
        log=proxy.log.with_name("control-proxy.log"),
    )


@contextmanager
def serving(make_app: MakeApp) -> Iterator[str]:
    """Serve an application in a thread of this process; yields its URL."""
    import uvicorn

    with socket.create_server((HOST, 0)) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(make_app(), log_config=None, access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name=f"server {url}", daemon=True
        )
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(STOP_DEADLINE_S)
            if thread.is_alive():
                raise DeadlineExceeded(f"end of the server at {url}", STOP_DEADLINE_S)


def relay_of_other_prompt(prefill: str, other: Sequence[int]) -> MakeApp:
    """Return the maker of an application that passes on to `prefill`, with the prompt `other` instead."""

    def make() -> Any:
        import httpx
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        async def complete(request: Request) -> Response:
            body = {**await request.json(), "prompt": list(other)}
            async with httpx.AsyncClient(timeout=RELAY_DEADLINE_S, trust_env=False) as client:
                answer = await client.post(prefill + request.url.path, json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def health(request: Request) -> Response:
            try:
                async with httpx.AsyncClient(timeout=RELAY_DEADLINE_S, trust_env=False) as client:
                    answer = await client.get(prefill + request.url.path)
            except httpx.HTTPError:  # it has not started yet
                return Response(status_code=httpx.codes.SERVICE_UNAVAILABLE)
            return Response(status_code=answer.status_code)

        return Starlette(
            routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)]
        )

    return make
