"""The `kvstrata` command. Heavy imports happen inside the command that needs them: help answers at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata import __version__
from kvstrata.errors import KVStrataError
from kvstrata.store.cli import app as store_app

if TYPE_CHECKING:
    from kvstrata.doctor import Diagnosis

app = typer.Typer(
    name="kvstrata",
    help=(
        "More KV cache than device memory for MLA and sparse-attention models on vLLM.\n\n"
        "Example: kvstrata demo --json build/demo.json\n\n"
        "A server is started with vLLM's own command and --kv-transfer-config; see README.md."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measure kvstrata against plain vLLM and memcpy on this machine.\n\n"
    "Example: kvstrata bench layerwise --json build/bench-layerwise.json",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, writable=True, help="Also write the result to FILE as JSON."
    ),
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that belong to no command."""


@app.command("demo")
def demo_command(
    json_file: JsonFile = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Checkpoint to serve. Default: the one in examples/models.",
            show_default=False,
        ),
    ] = None,
    pass_key: Annotated[
        str, typer.Option(metavar="DIGITS", help="The pass key to hide in the text.")
    ] = "48213",
    log: Annotated[Path, typer.Option(metavar="FILE", help="Where the engines' own output goes.")] = Path(
        "build/demo.log"
    ),
) -> None:
    """Serve a prompt that plain vLLM cannot hold in a small device budget, and check the answer.

    Four engines one after the other: plain vLLM in the budget, plain vLLM with enough memory, kvstrata in the
    budget, and kvstrata with its loads switched off (which must go wrong). About a minute on two cores.

    Exit code 1 if the answer is not exact or the comparison proves nothing.

    Example: kvstrata demo --json build/demo.json
    """
    from kvstrata.demo.command import DemoOptions, demo

    with _errors_explained(log):
        result = demo(DemoOptions(model=model, pass_key=pass_key), json_file=json_file, log=log)
    if result.problems:
        raise typer.Exit(1)


@app.command("doctor")
def doctor_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON instead of a table.")
    ] = False,
) -> None:
    """Check this environment, say how to mend what is wrong, and list what can run here.

    Exit code 1 if something required is broken.

    Example: kvstrata doctor
    """
    from kvstrata.doctor import diagnose, gather

    console = Console()
    if as_json:
        diagnosis = diagnose(gather())
        typer.echo(json.dumps(diagnosis.as_json(), indent=1))
    else:
        with console.status("importing vLLM"):
            diagnosis = diagnose(gather())
        _print_diagnosis(console, diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(1)


@bench_app.command("layerwise")
def bench_layerwise_command(
    json_file: JsonFile = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed runs of each side; they alternate.")
    ] = 7,
    prompt_tokens: Annotated[int, typer.Option(min=64, metavar="N", help="Length of the prompt.")] = 2000,
    log: Annotated[Path, typer.Option(metavar="FILE", help="Where the engines' own output goes.")] = Path(
        "build/bench-layerwise.log"
    ),
) -> None:
    """Layerwise prefill: its time against plain vLLM's, its copies against memcpy, its capacity.

    Every figure is a median; the raw runs are in the JSON. The two engines run side by side and take turns.

    Example: kvstrata bench layerwise --json build/bench-layerwise.json
    """
    from kvstrata.bench.layerwise import LayerwiseBenchOptions, bench_layerwise

    with _errors_explained(log):
        bench_layerwise(
            LayerwiseBenchOptions(repeats=repeats, prompt_tokens=prompt_tokens), json_file=json_file, log=log
        )


@contextmanager
def _errors_explained(log: Path) -> Iterator[None]:
    """Turn an exception into one line that says what to do, and exit code 1."""
    try:
        yield
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error
    except Exception as error:  # an engine that failed: its own output says why
        typer.echo(f"kvstrata: {type(error).__name__}: {error}", err=True)
        typer.echo(
            f"The engine's own output is in {log}; `kvstrata doctor` checks the environment.", err=True
        )
        raise typer.Exit(1) from error


def _print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    signs = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]PROBLEM[/]"}
    checks = Table(title="Environment")
    for column in ("", "what", "found", "fix"):
        checks.add_column(column, overflow="fold")
    for check in diagnosis.checks:
        checks.add_row(signs[check.status], check.name, check.found, check.fix)
    features = Table(title="What can run here")
    for column in ("", "feature", "why not"):
        features.add_column(column)
    for feature in diagnosis.features:
        features.add_row("[green]yes[/]" if feature.available else "no", feature.name, feature.why)
    console.print(checks, features)
