"""The launcher's command lines, CPUs, ports and options."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import kvstrata.serve_pd.command as command_module
from kvstrata.config import parse_additional_config, parse_connector_config
from kvstrata.errors import ConfigurationError
from kvstrata.serve_pd.machine import cpus_to_bind, find_ports
from kvstrata.serve_pd.options import EngineOptions, ServeOptions, has_sparse_attention
from kvstrata.serve_pd.plan import Launch, Ports, bind_cpus, one_cpu_per_core, plan_launches

PORTS = Ports(prefill=(101, 102), decode=(201,), kv=(301,), proxy=8000)


def planned(ports: Ports = PORTS, cpus=(0, 1, 2), **options) -> tuple[Launch, ...]:
    given = {"model": "m", "prefill": EngineOptions(count=len(ports.prefill)), **options}
    return plan_launches(ServeOptions(**given), ports, cpus=cpus, secret="the-secret", python="py")


def option(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


# Command lines


def test_a_launch_is_the_engines_and_the_proxy_before_them(tmp_path: Path):
    launches = planned(log_directory=tmp_path)
    assert [launch.name for launch in launches] == ["prefill-0", "prefill-1", "decode-0", "proxy"]
    assert [launch.url for launch in launches] == [
        "http://127.0.0.1:101",
        "http://127.0.0.1:102",
        "http://127.0.0.1:201",
        "http://127.0.0.1:8000",
    ]
    assert launches[0].argv[:5] == ("py", "-m", "vllm.entrypoints.openai.api_server", "--model", "m")
    assert launches[0].argv[5:9] == ("--host", "127.0.0.1", "--port", "101")
    assert launches[-1].argv == (
        *("py", "-m", "kvstrata", "proxy"),
        *("--prefill", "http://127.0.0.1:101", "--prefill", "http://127.0.0.1:102"),
        *("--decode", "http://127.0.0.1:201"),
        *("--host", "127.0.0.1", "--port", "8000", "--deadline", "600"),
    )
    assert {launch.log.name for launch in launches} == {
        "prefill-0.log",
        "prefill-1.log",
        "decode-0.log",
        "proxy.log",
    }


def test_engines_are_told_their_role_port_and_features():
    prefill, _, decode, _ = planned(
        num_shared_buffers=3,
        use_sparse=True,
        topk_buffer_size=128,
        dram_size_per_dp_gb=0.5,
        transfer_backend="tcp",
    )
    p, d = (json.loads(option(launch, "--kv-transfer-config")) for launch in (prefill, decode))
    assert p == {
        "kv_connector": "KVStrataConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "kv_port": 301,
            "transfer_backend": "tcp",
            "use_layerwise": True,
            "layerwise_num_shared_buffers": 3,
        },
    }
    assert (d["kv_role"], d["kv_connector_extra_config"]) == (
        "kv_consumer",
        {"kv_port": 301, "transfer_backend": "tcp"},
    )
    additional = json.loads(option(decode, "--additional-config"))
    assert additional == {
        "sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 128, "dram_size_per_dp_GB": 0.5}
    }
    assert "--additional-config" not in prefill.argv
    assert parse_connector_config(p["kv_connector_extra_config"]).transfer.is_on
    assert parse_additional_config(additional).sparse_offload.enabled


def test_plain_engines_on_both_sides_are_possible():
    prefill, _, decode, _ = planned(use_layerwise=False)
    assert "use_layerwise" not in option(prefill, "--kv-transfer-config")
    assert "--additional-config" not in decode.argv


def test_ranks_of_decode_engines_have_ports_of_their_own():
    ports = Ports(prefill=(101,), decode=(201, 202), kv=(300, 302), proxy=8000)
    launches = planned(
        ports,
        prefill=EngineOptions(tp_size=4),
        decode=EngineOptions(count=2, tp_size=2),
    )
    extra = [json.loads(option(e, "--kv-transfer-config"))["kv_connector_extra_config"] for e in launches[:3]]
    assert [config["kv_port"] for config in extra] == [300, 300, 302]
    assert [option(engine, "--tensor-parallel-size") for engine in launches[:3]] == ["4", "2", "2"]


def test_the_users_arguments_come_last_and_the_roles_after_the_common_ones():
    prefill, _, decode, _ = planned(
        arguments="--dtype float32 --enforce-eager",
        prefill=EngineOptions(count=2, arguments="--max-num-seqs 4", extra_config={"backend": "none"}),
        decode=EngineOptions(arguments="--served-model-name 'a b'"),
    )
    assert prefill.argv[-5:] == ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4")
    assert decode.argv[-5:] == ("--dtype", "float32", "--enforce-eager", "--served-model-name", "a b")
    assert '"backend": "none"' in option(prefill, "--kv-transfer-config")
    assert "backend" not in option(decode, "--kv-transfer-config").replace("transfer_backend", "")


def test_the_secret_goes_by_the_environment_alone():
    for launch in planned():
        assert launch.environment["KVSTRATA_REMOTE_SECRET"] == "the-secret"
        assert not [word for word in launch.argv if "the-secret" in word]
        assert "the-secret" not in launch.as_shell()
        assert launch.as_shell().startswith("KVSTRATA_REMOTE_SECRET=... ")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_proxy_on_every_address_is_reached_by_engines_on_loopback(host: str):
    proxy = planned(host=host)[-1]
    assert option(proxy, "--host") == host
    assert option(proxy, "--metaserver-url") == "http://127.0.0.1:8000/v1/metaserver"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decode": EngineOptions(count=0)}, "--decode=0"),
        ({"prefill": EngineOptions(tp_size=2), "decode": EngineOptions(tp_size=4)}, "tensor_parallel_size=2"),
        ({"arguments": "--port 5"}, "--engine-args holds --port: use --port of serve-pd"),
        ({"prefill": EngineOptions(arguments="-tp=2")}, "--prefill-args holds -tp=2: use --prefill-tp"),
        ({"decode": EngineOptions(arguments="--tensor_parallel_size 2")}, "use --prefill-tp and --decode-tp"),
        ({"decode": EngineOptions(arguments="'")}, "--decode-args"),
        ({"use_layerwise": False, "num_shared_buffers": 2}, "--shared-buffers=2 has no effect"),
        ({"topk_buffer_size": 2}, "have no effect without sparse"),
        ({"transfer_backend": "pigeon"}, "transfer_backend='pigeon'"),
        ({"prefill": EngineOptions(extra_config={"use_layerwis": True})}, "use_layerwis"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, says: str):
    given = {"prefill": EngineOptions(), **options}
    ports = Ports(prefill=(101,), decode=(201,), kv=(301,), proxy=8000)
    with pytest.raises(ConfigurationError) as error:
        plan_launches(ServeOptions(model="m", **given), ports, cpus=(), secret="s", python="py")
    assert says in str(error.value)


def test_sparse_attention_is_seen_in_a_local_checkpoint(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"index_topk": 64}')
    assert has_sparse_attention(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not has_sparse_attention(str(tmp_path))
    assert not has_sparse_attention("org/name")


# CPUs


@pytest.mark.parametrize(
    ("cpus", "ranks", "bound"),
    [
        ([0, 1], [1, 1], ["0", "1"]),
        ([0, 1], [2, 2], ["0|1", "0|1"]),
        ([5], [1, 1, 1], ["5", "5", "5"]),
        ([0, 1, 2], [1, 1], ["0", "1,2"]),
        ([0, 2, 4, 6], [2, 1], ["0|2", "4,6"]),
        (list(range(8)), [1, 1], ["0,1,2", "4,5,6"]),
    ],
)
def test_cpus_are_split_between_ranks(cpus, ranks, bound):
    assert bind_cpus(cpus, ranks) == bound


def test_without_cpus_nothing_is_bound():
    assert all("VLLM_CPU_OMP_THREADS_BIND" not in launch.environment for launch in planned(cpus=()))
    binds = [launch.environment.get("VLLM_CPU_OMP_THREADS_BIND") for launch in planned(cpus=(0, 1, 2))]
    assert binds == ["0", "1", "2", None]


def test_one_cpu_of_each_core_is_used():
    siblings = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    assert one_cpu_per_core([0, 1, 2, 3], siblings) == [0, 1]
    assert one_cpu_per_core([2, 3], siblings) == [2, 3]
    assert one_cpu_per_core([4, 5], {}) == [4, 5]


def test_this_machines_cpus_are_among_those_allowed():
    assert set(cpus_to_bind()) <= os.sched_getaffinity(0)


# Ports


def test_free_ports_are_all_different_and_ranges_are_whole():
    options = ServeOptions(
        model="m", prefill=EngineOptions(count=2, tp_size=2), decode=EngineOptions(count=2, tp_size=2), port=0
    )
    ports = find_ports(options)
    ranges = [port + rank for port in ports.kv for rank in range(2)]
    every = [*ports.prefill, *ports.decode, *ranges, ports.proxy]
    assert len(every) == len(set(every)) == 9


@pytest.mark.parametrize("name", ["port", "kv_port"])
def test_a_port_that_is_taken_is_named(name: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}: port {port}"):
            find_ports(ServeOptions(model="m", **{name: port}))


def test_control_ports_beyond_the_last_port_are_refused():
    options = ServeOptions(model="m", port=0, kv_port=65535, decode=EngineOptions(count=2))
    with pytest.raises(ConfigurationError, match="--kv-port"):
        find_ports(options)


# The command


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(command_module.serve_pd_command)
    return CliRunner().invoke(app, list(arguments))


def test_a_dry_run_prints_what_would_be_started_and_starts_nothing(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"index_topk": 64}')
    result = invoke(
        "--model", str(tmp_path), "--port", "0", "--dry-run", "--decode", "2", "--log-dir", "nowhere"
    )
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 4
    assert [line.count("api_server") for line in lines] == [1, 1, 1, 0]
    assert ["sparse_kv_offload_config" in line for line in lines] == [False, True, True, False]
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prefill-config", "{"], "--prefill-config={: not JSON"),
        (["--decode-config", "[]"], "--decode-config=[]: not a JSON object"),
        (["--engine-args", "--host x"], "--engine-args holds --host"),
        (["--prefill-tp", "3", "--decode-tp", "2"], "tensor_parallel_size=3"),
        (["--secret", "x"], "--secret"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(arguments: list[str], says: str):
    result = invoke("--model", "m", "--port", "0", "--dry-run", *arguments)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_the_commands_exit_code_is_the_launchs(monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def fake(launches, **options):
        seen.update(options, names=[launch.name for launch in launches])
        return 1

    monkeypatch.setattr("kvstrata.serve_pd.run.run", fake)
    result = invoke(
        "--model", "m", "--port", "0", "--prefill", "2", "--restarts", "5", "--start-deadline", "7"
    )
    assert result.exit_code == 1
    assert seen["names"] == ["prefill-0", "prefill-1", "decode-0", "proxy"]
    assert (seen["restarts"], seen["start_deadline_s"]) == (5, 7)


def test_every_launch_has_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KVSTRATA_REMOTE_SECRET", raising=False)
    made = {command_module._secret(None) for _ in range(3)}
    assert len(made) == 3
    monkeypatch.setenv("KVSTRATA_REMOTE_SECRET", "from-the-environment")
    assert command_module._secret(None) == "from-the-environment"
    assert command_module._secret("from-the-option") == "from-the-option"


def test_the_help_loads_no_server():
    code = (
        "import sys\nimport kvstrata.serve_pd.command\n"
        "heavy = {'httpx', 'rich.live', 'torch', 'vllm', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
