"""`kvstrata sim`. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.errors import ConfigurationError

if TYPE_CHECKING:
    from kvstrata.sim.campaign import Campaign


def sim_command(
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="How many runs.")] = 1000,
    first_seed: Annotated[int, typer.Option("--first-seed", min=0, metavar="K", help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, metavar="J", help="Processes to run them in.")] = 1,
    mutant: Annotated[
        str,
        typer.Option(
            "--mutant",
            metavar="NAME",
            help="Build a known defect in, which the run must find; `list` names them.",
            show_default=False,
        ),
    ] = "",
    trace: Annotated[
        bool, typer.Option("--trace", help="Print every event of the seed; for one seed alone.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the result to FILE as JSON."),
    ] = None,
) -> None:
    """Simulate prefill, decode, proxy and network with faults, seed by seed, and check every invariant.

    Prefill and decode are simulated on a virtual clock around the real remote-read machines: messages are
    lost, doubled, late and out of order, processes crash, restart and stop, clients leave. A seed that fails
    is printed with its options, its last events and the command that repeats it.

    Exit code 1 if a seed failed; with --mutant, if none did.

    Example: kvstrata sim --seeds 2000 --jobs 2
    """
    from kvstrata.sim.campaign import replay_command, run_seeds
    from kvstrata.sim.mutants import MUTANTS, parts_of
    from kvstrata.sim.run import run_seed

    console = Console(soft_wrap=True, highlight=False)
    if mutant == "list":
        for name, known in MUTANTS.items():
            console.print(f"{name:<28} {known.defect}", markup=False)
        return
    try:
        if trace:
            outcome = run_seed(first_seed, parts_of(mutant), trace_events=None, keep_trace=True)
            typer.echo("\n".join(outcome.trace))
        campaign = run_seeds(first_seed, seeds if not trace else 1, jobs=jobs, mutant=mutant)
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    for failure in campaign.failures:
        typer.echo(failure.report(replay_command(failure.seed, mutant)))
    console.print(_table(campaign))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(_summary(campaign), indent=2) + "\n")
    found = len(campaign.failures)
    if mutant:
        typer.echo(f"mutant {mutant}: " + (f"found after {campaign.seeds} seeds" if found else "not found"))
    else:
        typer.echo(f"{campaign.seeds} seeds, {found} failed")
    if bool(found) != bool(mutant):
        raise typer.Exit(1)


def _summary(campaign: Campaign) -> dict[str, Any]:
    return {
        "mutant": campaign.mutant,
        "seeds": campaign.seeds,
        "failed_seeds": [failure.seed for failure in campaign.failures],
        "events": campaign.events,
        "virtual_s": round(campaign.virtual_s, 3),
        "wall_s": round(campaign.wall_s, 3),
        "counts": dict(sorted(campaign.counts.items())),
    }


def _table(campaign: Campaign) -> Table:
    table = Table(title="What was simulated", show_header=False)
    rows = {
        "seeds": f"{campaign.seeds:,}",
        "seeds a second": f"{campaign.seeds / max(campaign.wall_s, 1e-9):,.0f}",
        "events": f"{campaign.events:,}",
        "virtual time": f"{campaign.virtual_s:,.0f} s",
        **{name: f"{count:,}" for name, count in sorted(campaign.counts.items())},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
