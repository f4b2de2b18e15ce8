"""`kvstrata trace record`, `replay` and `plot`. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.errors import KVStrataError

app = typer.Typer(
    name="trace",
    help="Record which rows decoding selects; compare sizes and policies of hot rows on such a trace.\n\n"
    "Example: kvstrata trace replay calibrated --sizes 1,2,4",
    no_args_is_help=True,
)

_LOG = Path("build/trace-record.log")


@app.command("record")
def record_command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", dir_okay=False, help="The trace; each rank adds its number to the name."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="A DSA checkpoint. Default: the one in examples/models.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=64, metavar="N", help="Length of a prompt.")] = 1500,
    new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens that a request decodes.")] = 128,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests that decode together.")] = 1,
    log: Annotated[Path, typer.Option(metavar="FILE", help="Where the engine's own output goes.")] = _LOG,
) -> None:
    """Serve a text with sparse decode offload, and write down which rows decoding selects.

    Example: kvstrata trace record --out build/run.trace --new-tokens 64
    """
    from kvstrata.bench.trace_record import RecordOptions, record

    options = RecordOptions(
        model=model, out=out, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens
    )
    with _errors_explained(log):
        record(options, log=log)


@app.command("replay")
def replay_command(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE",
            help="Recorded files, or `calibrated` or `harder`, which are synthetic. Default: both of these.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies", metavar="NAMES", help="Policies, by commas. Default: all.", show_default=False
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="NUMBERS", help="Hot rows in multiples of top-k, by commas.")
    ] = "1,2,4",
    warm_up: Annotated[
        int | None,
        typer.Option(
            "--warm-up",
            min=0,
            metavar="N",
            help="First selections of a share group that do not count. Default: 64 if synthetic, else 0.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the result to FILE as JSON."),
    ] = None,
) -> None:
    """Send traces through the residency table that serves decode, and count what misses.

    The last row is the fewest misses possible, by a policy that knows the future. A recorded trace needs
    SIZE x top-k hot rows for each request that decoded together.

    Example: kvstrata trace replay calibrated harder --policies lru --sizes 1,2,4 --json build/misses.json
    """
    chosen_policies, chosen_sizes = _policies(policies), _sizes(sizes)
    from rich.console import Console

    from kvstrata.bench.trace_replay import ReplayOptions, replay_traces

    options = ReplayOptions(
        traces=tuple(traces or ("calibrated", "harder")),
        policies=chosen_policies,
        sizes=chosen_sizes,
        warm_up=warm_up,
    )
    with _errors_explained():
        replay_traces(options, json_file=json_file, console=Console())


@app.command("plot")
def plot_command(
    result: Annotated[
        Path,
        typer.Argument(
            metavar="JSON", exists=True, dir_okay=False, help="A result of trace replay or bench residency."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", dir_okay=False, help="The SVG to write.")
    ] = Path("build/misses.svg"),
) -> None:
    """Draw misses against the size of the hot rows, one curve a policy. Needs the extra `plot`.

    Example: kvstrata trace plot build/misses.json --out build/misses.svg
    """
    from kvstrata.trace.plot import draw, read_curves

    with _errors_explained():
        draw(read_curves(result), out)
        typer.echo(f"written: {out}")


def _policies(text: str | None) -> tuple[str, ...]:
    from kvstrata.core.eviction import POLICIES

    names = tuple(POLICIES) if text is None else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(
                f"{name!r} is no policy; choose from {', '.join(POLICIES)}", param_hint="--policies"
            )
    return tuple(dict.fromkeys(names))


def _sizes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(sorted({float(size) for size in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no list of numbers; write for example 1,2,4", param_hint="--sizes"
        ) from None
    if not all(1 <= size <= 1024 for size in sizes):
        raise typer.BadParameter(
            f"{text!r}: a selection needs at least 1 x top-k hot rows; use sizes from 1 to 1024",
            param_hint="--sizes",
        )
    return sizes


@contextmanager
def _errors_explained(log: Path | None = None) -> Iterator[None]:
    """Turn an expected exception into one line, and exit code 1; with `log`, any that an engine raised."""
    try:
        yield
    except (KVStrataError, OSError) as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error
    except Exception as error:
        if log is None:
            raise
        typer.echo(f"kvstrata: {type(error).__name__}: {error}", err=True)
        typer.echo(
            f"The engine's own output is in {log}; `kvstrata doctor` checks the environment.", err=True
        )
        raise typer.Exit(1) from error
