"""The command as a person meets it: help at once, errors in one line, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvstrata
from kvstrata.cli import app
from kvstrata.cli_docs import commands
from kvstrata.errors import ConfigurationError


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys\n"
        "from kvstrata.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'numpy', 'numba', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout


def test_version(runner: CliRunner):
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"kvstrata {kvstrata.__version__}"


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_every_command_explains_itself(runner: CliRunner, path: str):
    result = runner.invoke(app, [*path.split()[1:], "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_commands_are_frozen():
    """A new or renamed command is a change of the public face: change this list on purpose."""
    assert [path for path, _ in commands()] == [
        "kvstrata demo",
        "kvstrata doctor",
        "kvstrata serve-pd",
        "kvstrata proxy",
        "kvstrata sim",
        "kvstrata bench layerwise",
        "kvstrata bench decode",
        "kvstrata bench pd",
        "kvstrata bench transport",
        "kvstrata bench kvpp",
        "kvstrata bench residency",
        "kvstrata bench store",
        "kvstrata store stat",
        "kvstrata store clear",
        "kvstrata store serve",
        "kvstrata trace record",
        "kvstrata trace replay",
        "kvstrata trace plot",
    ]


def test_an_unknown_command_is_refused(runner: CliRunner):
    assert runner.invoke(app, ["dmeo"]).exit_code == 2


def test_a_model_that_is_not_there_is_named(runner: CliRunner, tmp_path: Path):
    missing = tmp_path / "no-model"
    result = runner.invoke(app, ["demo", "--model", str(missing), "--log", str(tmp_path / "log")])
    assert result.exit_code == 1
    assert f"--model={missing}" in result.output
    assert "Traceback" not in result.output


def test_a_failed_engine_points_to_its_log_and_to_doctor(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("kvstrata.demo.command.demo", broken)
    result = runner.invoke(app, ["demo", "--log", str(tmp_path / "demo.log")])
    assert result.exit_code == 1
    assert "RuntimeError: no such operator" in result.output
    assert str(tmp_path / "demo.log") in result.output
    assert "kvstrata doctor" in result.output


@pytest.mark.parametrize(("problems", "exit_code"), [([], 0), (["differs"], 1)])
def test_demo_exits_by_its_findings(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, problems: list[str], exit_code: int
):
    monkeypatch.setattr("kvstrata.demo.command.demo", lambda *a, **k: SimpleNamespace(problems=problems))
    assert runner.invoke(app, ["demo"]).exit_code == exit_code


def test_demo_passes_its_options_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = {}

    def remember(options: object, *, json_file: Path, log: Path) -> SimpleNamespace:
        seen.update(options=options, json_file=json_file, log=log)
        return SimpleNamespace(problems=[])

    monkeypatch.setattr("kvstrata.demo.command.demo", remember)
    arguments = [
        "demo",
        "--json",
        "a.json",
        "--model",
        str(tmp_path),
        "--pass-key",
        "11111",
        "--log",
        "b.log",
    ]
    assert runner.invoke(app, arguments).exit_code == 0
    assert seen["options"].model == tmp_path
    assert seen["options"].pass_key == "11111"
    assert (seen["json_file"], seen["log"]) == (Path("a.json"), Path("b.log"))


def test_bench_passes_its_options_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    seen = {}
    monkeypatch.setattr(
        "kvstrata.bench.layerwise.bench_layerwise",
        lambda options, **kwargs: seen.update(options=options, **kwargs),
    )
    arguments = ["bench", "layerwise", "--repeats", "3", "--prompt-tokens", "900", "--json", "c.json"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert (seen["options"].repeats, seen["options"].prompt_tokens) == (3, 900)
    assert seen["json_file"] == Path("c.json")


def test_bench_decode_passes_its_options_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    seen = {}
    monkeypatch.setattr(
        "kvstrata.bench.decode.bench_decode", lambda options, **kwargs: seen.update(options=options, **kwargs)
    )
    arguments = ["bench", "decode", "--repeats", "3", "--json", "d.json", "--log", "e.log"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert seen["options"].repeats == 3
    assert (seen["json_file"], seen["log"]) == (Path("d.json"), Path("e.log"))
    assert runner.invoke(app, ["bench", "decode", "--repeats", "0"]).exit_code == 2


def test_bench_pd_passes_its_options_on(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    seen = {}
    monkeypatch.setattr(
        "kvstrata.bench.pd.bench_pd", lambda options, **kwargs: seen.update(options=options, **kwargs)
    )
    arguments = ["bench", "pd", "--repeats", "3", "--prompt-tokens", "900", "--json", "p.json"]
    assert runner.invoke(app, [*arguments, "--log", "p.log"]).exit_code == 0
    assert (seen["options"].repeats, seen["options"].prompt_tokens) == (3, 900)
    assert (seen["json_file"], seen["log"]) == (Path("p.json"), Path("p.log"))


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--prompt-tokens", "1"], ["--repeats", "many"]])
def test_bench_refuses_values_out_of_range(runner: CliRunner, arguments: list[str]):
    assert runner.invoke(app, ["bench", "layerwise", *arguments]).exit_code == 2


def test_an_error_of_ours_is_one_line(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConfigurationError("backend='loacl': use 'local'")

    monkeypatch.setattr("kvstrata.bench.layerwise.bench_layerwise", refuse)
    result = runner.invoke(app, ["bench", "layerwise"])
    assert result.exit_code == 1
    assert result.output.strip() == "kvstrata: backend='loacl': use 'local'"


def test_doctor_prints_json_and_exits_by_health(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    from doctor_facts import HEALTHY, replaced

    monkeypatch.setattr("kvstrata.doctor.gather", lambda: HEALTHY)
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["healthy"] is True

    monkeypatch.setattr("kvstrata.doctor.gather", lambda: replaced(vllm_version=None))
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["healthy"] is False


def test_doctor_prints_a_fix_for_every_problem(runner: CliRunner, monkeypatch: pytest.MonkeyPatch):
    from doctor_facts import replaced

    monkeypatch.setattr("kvstrata.doctor.gather", lambda: replaced(lmdb_error="no module"))
    result = runner.invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "PROBLEM" in result.output
    assert "pip install 'lmdb>=1.4'" in result.output
