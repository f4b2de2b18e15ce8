"""The proxy and its engines as processes: killed, stopped, restarted; the command's own start and end."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import proxy_fakes
import pytest
import typer
from proxy_fakes import DEADLINE_S, SECRET, Server, listen, until
from typer.testing import CliRunner

from kvstrata.proxy.app import create_app
from kvstrata.proxy.command import proxy_command
from kvstrata.proxy.options import ProxyOptions

LONG, SLOW_S = 100_000, 0.01
COMMAND = (
    "import typer; from kvstrata.proxy.command import proxy_command; "
    "app = typer.Typer(); app.command()(proxy_command); app()"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def engine_process(port: int, words: int, slowness_s: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, proxy_fakes.__file__, str(port), str(words), str(slowness_s)]
    process = subprocess.Popen(command)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the engine's health")
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def proxy_before(port: int, *, health_deadline_s: float) -> Iterator[Server]:
    options = ProxyOptions(
        prefill=(),
        decode=(f"http://127.0.0.1:{port}",),
        secret=SECRET,
        metaserver_url="http://127.0.0.1:1/unused",
        health_interval_s=0.05,
        health_deadline_s=health_deadline_s,
        misses_until_lost=3,
    )
    app = create_app(options)
    server = Server(app, listen())
    try:
        until(lambda: app.state.engines.pool.backends[0].is_in, "readiness")
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stopped_ends_its_streams_and_comes_back(how: signal.Signals):
    port = free_port()
    body = {"prompt": "x", "stream": True}
    # Only the silence of a stopped engine is found out by the passing of time.
    health_deadline_s = 1.5 if how is signal.SIGSTOP else DEADLINE_S
    with (
        engine_process(port, LONG, SLOW_S) as process,
        proxy_before(port, health_deadline_s=health_deadline_s) as proxy,
    ):
        client = httpx.Client(base_url=proxy.url, timeout=DEADLINE_S, trust_env=False)
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "word" in next(lines)
            process.send_signal(how)
            rest = list(lines)
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == 502
        assert rest[-1] == "data: [DONE]"

        def is_out_and_idle() -> bool:
            state = client.get("/health").json()["backends"][0]
            return (state["in"], state["requests"]) == (False, 0)

        until(is_out_and_idle, "the engine to be out, and nothing to be left there")
        if how is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            until(lambda: client.get("/health").json()["backends"][0]["in"], "the return")
            return
        process.wait(DEADLINE_S)
        with engine_process(port, 3, 0.0):
            until(lambda: client.get("/health").json()["backends"][0]["in"], "the return")
            assert "wordwordword" in client.post("/v1/completions", json={"prompt": "x"}).text


def run_proxy(*arguments: str, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command on a free port; return it and the port it says."""
    environment = {**os.environ, "KVSTRATA_REMOTE_SECRET": SECRET.decode()}
    with log.open("wb") as output:
        command = [sys.executable, "-c", COMMAND, "--port", "0", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def port_line() -> list[str]:
        assert process.poll() is None, log.read_text()
        return [line for line in log.read_text().splitlines() if "listening on" in line]

    try:
        line = until(port_line, "the proxy's start")
    except BaseException:
        process.kill()
        raise
    return process, int(line[0].split()[-1])


def test_the_command_serves_and_ends_in_time_with_a_stream_open(tmp_path: Path):
    port = free_port()
    with engine_process(port, LONG, SLOW_S):
        log = tmp_path / "proxy.log"
        process, proxy_port = run_proxy("--decode", f"http://127.0.0.1:{port}", log=log)
        url = f"http://127.0.0.1:{proxy_port}"
        try:
            until(lambda: answers(url + "/v1/models"), "the decode to be in")
            body = {"prompt": "x", "stream": True}
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=DEADLINE_S) as response:
                lines = (line for line in response.iter_lines() if line)
                assert "word" in next(lines)
                process.terminate()
                rest = list(lines)
            assert "shutting down" in rest[-2]
            assert rest[-1] == "data: [DONE]"
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait(DEADLINE_S)
        assert "Traceback" not in log.read_text()


def test_a_killed_proxy_ends_its_requests_at_the_engine(tmp_path: Path):
    engine = proxy_fakes.FakeEngine(wants_kv=False, pauses_after=1)
    server = Server(engine, listen())
    process, proxy_port = run_proxy("--decode", server.url, log=tmp_path / "proxy.log")
    try:
        url = f"http://127.0.0.1:{proxy_port}"
        until(lambda: answers(url + "/v1/models"), "the decode to be in")
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=DEADLINE_S) as response:
            next(response.iter_lines())
            process.kill()
            until(lambda: engine.requests[0].is_aborted, "the abort at decode")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        server.stop()


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(proxy_command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--decode", "nowhere", "--port", "0"], "--decode=nowhere: not a URL"),
        (["--decode", "http://a:1", "--host", "0.0.0.0", "--port", "0"], "--metaserver-url"),
        (["--decode", "http://a:1", "--host", "203.0.113.1", "--port", "0"], "cannot listen there"),
        (["--decode", "http://a:1", "--port", "0", "--secret", "x"], "--secret"),
        (["--decode", "http://a:1", "--port", "0", "--log-level", "loud"], "--log-level=loud"),
        (["--decode", "http://a:1", "--port", "0", "--deadline", "0"], "--deadline=0.0"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(arguments: list[str], says: str):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_wildcard_host_needs_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KVSTRATA_REMOTE_SECRET", raising=False)
    arguments = [
        "--decode",
        "http://a:1",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--metaserver-url",
        "http://b:1/m",
    ]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "--secret is not set" in result.output


def test_a_port_that_is_taken_is_said(tmp_path: Path):
    with listen() as taken:
        result = invoke("--decode", "http://a:1", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "cannot listen there" in result.output


def test_missing_decode_is_a_usage_error():
    assert invoke("--prefill", "http://a:1").exit_code == 2


def test_the_help_loads_no_server():
    code = (
        "import sys, typer\nfrom kvstrata.proxy.command import proxy_command\n"
        "heavy = {'fastapi', 'uvicorn', 'httpx', 'torch', 'vllm', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
