"""`kvstrata store serve`: what is checked before anything starts, what is printed, what is started."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.config import parse_connector_config
from kvstrata.errors import StoreUnavailable
from kvstrata.serve_store.plan import StorePlan, engine_config, servers
from kvstrata.serve_store.processes import StoreProcesses


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["store", "serve", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def plan(backend: str) -> StorePlan:
    return StorePlan(
        backend=backend,
        size_bytes=3 << 30,
        log_dir=Path("logs"),
        port=1001,
        second_port=1002,
        metrics_port=1003,
    )


def test_a_local_store_is_made_and_its_json_printed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    code, output, _ = run("--backend", "local", "--size-gb", "0.01", "--path", str(path))
    assert code == 0
    extra = json.loads(output)["kv_connector_extra_config"]
    assert parse_connector_config(extra).store.store_path == str(path)
    assert (path / "kvstrata-store.json").exists()


@pytest.mark.parametrize(("backend", "protocol"), [("mooncake", "shm"), ("memcache", "host_shm")])
def test_engines_are_told_where_the_servers_are(backend: str, protocol: str) -> None:
    config = engine_config(replace(plan(backend), protocol=protocol))
    store = parse_connector_config(config["kv_connector_extra_config"]).store
    assert (store.backend, store.store_address) == (backend, "127.0.0.1:1001")
    second = store.store_client_address if backend == "mooncake" else store.store_config_address
    assert (second, store.store_size_bytes) == ("127.0.0.1:1002", 3 << 30)
    assert [server.log.name for server in servers(plan(backend))][1] == f"{backend}-owner.log"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "redis"), "'redis'"),
        (("--backend", "mooncake", "--path", "/tmp/x"), "--path"),
        (("--backend", "mooncake", "--size-gb", "inf"), "--size-gb inf is no size"),
        (("--backend", "local", "--size-gb", "inf"), "--size-gb inf is no size"),
        (("--backend", "mooncake", "--size-gb", "1e30"), "--size-gb 1e+30 is more than"),
        (("--backend", "mooncake", "--host", "no such host"), "--host 'no such host' is no IPv4 address"),
        (("--backend", "mooncake", "--host", "::1"), "--host '::1' is no IPv4 address"),
        (("--backend", "mooncake", "--host", "192.0.2.1"), "--host '192.0.2.1' is no IPv4 address"),
        (("--backend", "mooncake", "--host", "0.0.0.0"), "name one interface"),
        (("--backend", "mooncake", "--host", ""), "name one interface"),
        (("--backend", "mooncake", "--protocol", "pigeon"), "pigeon"),
        (("--backend", "mooncake", "--protocol", "host_shm"), "host_shm"),
        (("--backend", "mooncake", "--port", "1", "--log-dir", "/dev/null/logs"), "/dev/null/logs"),
        (("--backend", "local", "--protocol", "tcp"), "--protocol tcp has no effect"),
        (("--backend", "local", "--port", "5000"), "--port 5000 has no effect"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.serve_store.run.library", lambda name: None)  # it need not be installed
    code, output, errors = run(*words)
    assert (code, output) == (1, "")
    assert said in errors


def test_a_port_that_is_taken_leaves_the_log_of_whoever_took_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = replace(plan("mooncake"), port=taken.getsockname()[1], log_dir=tmp_path)
        log = servers(made)[0].log
        log.write_text("what the other one said")
        processes = StoreProcesses(made)
        with pytest.raises(StoreUnavailable, match=r"port \d+ of 127.0.0.1 is taken, so mooncake's master"):
            processes.start(deadline_s=1.0)
        processes.close()
        assert log.read_text() == "what the other one said"
