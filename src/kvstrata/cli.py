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
from kvstrata.proxy.command import proxy_command
from kvstrata.serve_pd.command import serve_pd_command
from kvstrata.serve_store.command import store_serve_command
from kvstrata.sim_cli import sim_command
from kvstrata.store.cli import app as store_app
from kvstrata.trace_cli import app as trace_app

if TYPE_CHECKING:
    from kvstrata.doctor import Diagnosis

app = typer.Typer(
    name="kvstrata",
    help=(
        "More KV cache than device memory for MLA and sparse-attention models on vLLM.\n\n"
        "Example: kvstrata demo --json build/demo.json\n\n"
        "A server is started with vLLM's own command and --kv-transfer-config or --additional-config, a "
        "prefill and a decode engine on one machine with kvstrata serve-pd; see README.md."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph; otherwise they break where the source does
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measure kvstrata against plain vLLM and memcpy on this machine.\n\n"
    "Example: kvstrata bench layerwise --json build/bench-layerwise.json",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
app.add_typer(trace_app, name="trace")

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, writable=True, help="Also write the result to FILE as JSON."
    ),
]
EngineLog = Annotated[Path, typer.Option(metavar="FILE", help="Where the engines' own output goes.")]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Timed runs of each side; they alternate.")]
PromptTokens = Annotated[int, typer.Option(min=64, metavar="N", help="Length of the prompt.")]


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
    log: EngineLog = Path("build/demo.log"),
) -> None:
    """Serve a prompt that plain vLLM cannot hold in a small device budget, and check the answer.

    Six engines one after the other: plain vLLM in the budget, plain vLLM with enough memory, then kvstrata in
    the budget, with layerwise prefill offload and with sparse decode offload, each of them a second time with
    its data path broken (which must go wrong). Then a prefill engine, a decode engine and a proxy together
    serve several prompts, and one with the KV of another (which must go wrong). Last, two ranks with a budget
    each: plain vLLM, KVPP, and KVPP with nothing passed from rank to rank (which must go wrong); left out
    where there is one CPU. About four minutes on two idle cores.

    Exit code 1 if an answer is not exact or a comparison proves nothing.

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


app.command("serve-pd")(serve_pd_command)
app.command("proxy")(proxy_command)
app.command("sim")(sim_command)
store_app.command("serve")(store_serve_command)


@bench_app.command("layerwise")
def bench_layerwise_command(
    json_file: JsonFile = None,
    repeats: Repeats = 7,
    prompt_tokens: PromptTokens = 2000,
    log: EngineLog = Path("build/bench-layerwise.log"),
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


@bench_app.command("decode")
def bench_decode_command(
    json_file: JsonFile = None,
    repeats: Repeats = 5,
    log: EngineLog = Path("build/bench-decode.log"),
) -> None:
    """Sparse decode offload: its time per token, and its tokens/s where plain vLLM must queue.

    Every figure is a median; the raw runs are in the JSON. The two engines run side by side and take turns.
    Exit code 1 if they answer differently.

    Example: kvstrata bench decode --json build/bench-decode.json
    """
    from kvstrata.bench.decode import DecodeBenchOptions, bench_decode

    with _errors_explained(log):
        bench_decode(DecodeBenchOptions(repeats=repeats), json_file=json_file, log=log)


@bench_app.command("pd")
def bench_pd_command(
    json_file: JsonFile = None,
    repeats: Repeats = 7,
    prompt_tokens: PromptTokens = 2000,
    log: Annotated[Path, typer.Option(metavar="FILE", help="Where the benchmark's own output goes.")] = Path(
        "build/bench-pd.log"
    ),
) -> None:
    """Prefill and decode: reads over shm and tcp against memcpy, time to first token against prefill alone.

    Every figure is a median; the raw runs are in the JSON. A prefill engine, a decode engine and the proxy
    run as `kvstrata serve-pd` starts them; their logs go to a directory named as the log without its ending.

    Example: kvstrata bench pd --json build/bench-pd.json
    """
    from kvstrata.bench.pd import PdBenchOptions, bench_pd

    with _errors_explained(log):
        bench_pd(PdBenchOptions(repeats=repeats, prompt_tokens=prompt_tokens), json_file=json_file, log=log)


@bench_app.command("transport")
def bench_transport_command(
    json_file: JsonFile = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed runs of each kind; they alternate.")
    ] = 9,
) -> None:
    """Transports: reads of 4 KiB to 16 MiB ranges over each that this machine has, against memcpy.

    Every figure is a median; the raw runs are in the JSON. No engine; a process and 128 MiB a transport.

    Example: kvstrata bench transport --json build/bench-transport.json
    """
    from kvstrata.bench.transport import bench_transport

    try:
        bench_transport(repeats=repeats, json_file=json_file, console=Console())
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error


@bench_app.command("kvpp")
def bench_kvpp_command(
    json_file: JsonFile = None,
    repeats: Repeats = 7,
    prompt_tokens: PromptTokens = 2000,
    log: EngineLog = Path("build/bench-kvpp.log"),
) -> None:
    """KVPP on two ranks: prefill and decode against plain vLLM, shm against collective, growth with blocks.

    Every figure is a median; the raw runs are in the JSON. Engines of two ranks take turns, two side by side,
    five in all: about seven minutes and 5 GiB of memory. Exit code 1 if two of them answer differently.

    Example: kvstrata bench kvpp --json build/bench-kvpp.json
    """
    from kvstrata.bench.kvpp import KvppBenchOptions, bench_kvpp

    with _errors_explained(log):
        bench_kvpp(
            KvppBenchOptions(repeats=repeats, prompt_tokens=prompt_tokens), json_file=json_file, log=log
        )


@bench_app.command("residency")
def bench_residency_command(
    json_file: JsonFile = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed runs of each kind; they alternate.")
    ] = 9,
) -> None:
    """Hot rows: time of a lookup, the row gather against memcpy, misses of the policies on two traces.

    Every time is a median; the raw runs are in the JSON. One thread, no engine; about 2 GiB of memory.

    Example: kvstrata bench residency --json build/bench-residency.json
    """
    from kvstrata.bench.residency import ResidencyBenchOptions, bench_residency

    try:
        bench_residency(ResidencyBenchOptions(repeats=repeats), json_file=json_file, console=Console())
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error


@bench_app.command("store")
def bench_store_command(
    json_file: JsonFile = None,
    repeats: Repeats = 7,
    store: Annotated[
        list[str] | None,
        typer.Option(
            "--store",
            metavar="NAME",
            help="local, mooncake, mooncake-shm or memcache; may be repeated. Default: all of them.",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        bool,
        typer.Option("--prefill/--no-prefill", help="Serve prompts with each store by real engines, too."),
    ] = True,
    log: EngineLog = Path("build/bench-store.log"),
) -> None:
    """Stores: puts and gets of 4 KiB to 16 MiB objects against memcpy, and prefills against plain vLLM.

    Every figure is a median; the raw runs are in the JSON. Servers are started where a store needs some, and
    ended; what cannot run here is left out, with the reason. About 4 GiB of memory, 1.5 without engines.

    Example: kvstrata bench store --json build/bench-store.json
    """
    from kvstrata.bench.store import STORES, StoreBenchOptions, bench_store
    from kvstrata.bench.store_prefill import StorePrefillOptions

    with _errors_explained(log):
        options = StoreBenchOptions(
            repeats=repeats,
            stores=tuple(store or STORES),
            prefill=StorePrefillOptions() if prefill else None,
        )
        bench_store(options, json_file=json_file, log=log)


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
