"""`kvstrata sim` as a person meets it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvstrata.sim_cli import sim_command


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("sim")(sim_command)
    return app


def run(app: typer.Typer, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.output


def test_seeds_without_a_failure_end_well_and_are_counted(app: typer.Typer, tmp_path: Path):
    target = tmp_path / "new" / "sim.json"
    code, shown = run(app, "--seeds", 12, "--first-seed", 5, "--json", target)
    assert code == 0, shown
    assert "12 seeds, 0 failed" in shown
    written = json.loads(target.read_text())
    assert (written["seeds"], written["failed_seeds"], written["mutant"]) == (12, [], "")
    assert written["counts"]["requests answered"] > 0
    assert written["events"] > 0 < written["virtual_s"]


def test_a_mutant_that_is_found_is_success_and_says_how_to_repeat_it(app: typer.Typer):
    code, shown = run(app, "--seeds", 500, "--mutant", "takes-the-first-share")
    assert code == 0, shown
    assert "mutant takes-the-first-share: found after" in shown
    assert "repeat with: kvstrata sim --first-seed" in shown
    command = shown.split("repeat with: kvstrata sim ")[1].splitlines()[0]
    code, again = run(app, *command.split())
    assert code == 0
    assert "found after 1 seeds" in again


def test_a_mutant_that_is_not_found_is_a_failure(app: typer.Typer):
    code, shown = run(app, "--seeds", 1, "--mutant", "restarts-under-its-old-epoch")
    assert code == 1
    assert "not found" in shown


def test_mutants_are_listed_with_their_defects(app: typer.Typer):
    code, shown = run(app, "--mutant", "list")
    assert code == 0
    assert "gate-dropped" in shown
    assert "prefill frees blocks when they are computed" in shown


def test_an_unknown_mutant_is_a_usage_error(app: typer.Typer):
    code, shown = run(app, "--mutant", "nothing")
    assert code == 2
    assert "'nothing' is unknown" in shown


def test_a_trace_shows_every_event_of_one_seed(app: typer.Typer):
    code, shown = run(app, "--trace", "--first-seed", 3)
    assert code == 0
    assert "hears" in shown
    assert "proxy    ends" in shown
    assert "1 seeds, 0 failed" in shown
