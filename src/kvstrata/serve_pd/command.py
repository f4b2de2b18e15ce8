"""`kvstrata serve-pd`. Imports of what it runs happen when it runs: help answers at once."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.errors import KVStrataError


def serve_pd_command(
    model: Annotated[str, typer.Option(metavar="MODEL", help="Checkpoint to serve, as for vLLM.")],
    prefill: Annotated[int, typer.Option(min=0, metavar="N", help="Prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, metavar="N", help="Decode engines.")] = 1,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address the proxy listens on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port the proxy listens on; 0: any.")
    ] = 8000,
    prefill_tp: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks of a prefill engine.")
    ] = 1,
    decode_tp: Annotated[
        int, typer.Option(min=1, metavar="N", help="The same of a decode engine; must divide --prefill-tp.")
    ] = 1,
    layerwise: Annotated[
        bool,
        typer.Option("--layerwise/--no-layerwise", help="Prefill keeps KV in host memory (use_layerwise)."),
    ] = True,
    shared_buffers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="layerwise_num_shared_buffers of prefill. Default: no sharing.",
            show_default=False,
        ),
    ] = None,
    sparse: Annotated[
        bool | None,
        typer.Option(
            "--sparse/--no-sparse",
            help="Sparse offload on decode. Default: for a local checkpoint with an indexer.",
            show_default=False,
        ),
    ] = None,
    topk_buffer_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="ROWS", help="sparse_kv_offload_config.topk_buffer_size.", show_default=False
        ),
    ] = None,
    dram_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="sparse_kv_offload_config.dram_size_per_dp_GB.", show_default=False),
    ] = None,
    transfer_backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How decode reads prefill's memory: auto, shm, tcp, nixl, mooncake or memfabric.",
        ),
    ] = "auto",
    kv_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="N",
            help="First control port of decode engines. Default: free ones.",
            show_default=False,
        ),
    ] = None,
    engine_args: Annotated[
        str, typer.Option(metavar="TEXT", help="More arguments for every engine, quoted as for a shell.")
    ] = "",
    prefill_args: Annotated[str, typer.Option(metavar="TEXT", help="The same for prefill engines.")] = "",
    decode_args: Annotated[str, typer.Option(metavar="TEXT", help="The same for decode engines.")] = "",
    prefill_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="More kv_connector_extra_config of prefill engines.", show_default=False
        ),
    ] = None,
    decode_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The same of decode engines.", show_default=False),
    ] = None,
    bind_cpus: Annotated[
        bool,
        typer.Option(
            "--bind-cpus/--no-bind-cpus",
            help="Split the CPUs between engines that compute on them (VLLM_CPU_OMP_THREADS_BIND).",
        ),
    ] = True,
    log_dir: Annotated[
        Path, typer.Option(metavar="DIR", file_okay=False, help="Where each process's output goes.")
    ] = Path("build/serve-pd"),
    start_deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time an engine may take to be ready.")
    ] = 900.0,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often each process that was ready is started again.")
    ] = 2,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest silence of an engine; see kvstrata proxy.")
    ] = 600.0,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Shared by all processes. Better in KVSTRATA_REMOTE_SECRET. Default: a new one.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command lines, start nothing.")
    ] = False,
) -> None:
    """Serve a model with prefill and decode engines and the proxy, all on this machine.

    Engines get free ports on loopback, and the CPUs are split between them. Everything ends with Ctrl-C or
    SIGTERM, and when a process cannot be kept running: then the exit code is 1, and the last lines of its
    log are printed.

    Example: kvstrata serve-pd --model examples/models/tiny-dsv32 --engine-args "--dtype float32"
    """
    from rich.console import Console

    from kvstrata.serve_pd.machine import cpus_to_bind, find_ports
    from kvstrata.serve_pd.options import EngineOptions, ServeOptions, has_sparse_attention, parse_object
    from kvstrata.serve_pd.plan import plan_launches
    from kvstrata.serve_pd.run import run

    try:
        options = ServeOptions(
            model=model,
            prefill=EngineOptions(
                count=prefill,
                tp_size=prefill_tp,
                arguments=prefill_args,
                extra_config=parse_object("--prefill-config", prefill_config),
            ),
            decode=EngineOptions(
                count=decode,
                tp_size=decode_tp,
                arguments=decode_args,
                extra_config=parse_object("--decode-config", decode_config),
            ),
            arguments=engine_args,
            host=host,
            port=port,
            kv_port=kv_port,
            transfer_backend=transfer_backend,
            use_layerwise=layerwise,
            num_shared_buffers=shared_buffers,
            use_sparse=has_sparse_attention(model) if sparse is None else sparse,
            topk_buffer_size=topk_buffer_size,
            dram_size_per_dp_gb=dram_gb,
            log_directory=log_dir,
            deadline_s=deadline,
        )
        launches = plan_launches(
            options,
            find_ports(options),
            cpus=cpus_to_bind() if bind_cpus else (),
            secret=_secret(secret),
            python=sys.executable,
        )
    except KVStrataError as error:
        typer.echo(f"kvstrata: {error}", err=True)
        raise typer.Exit(1) from error
    if dry_run:
        for launch in launches:
            typer.echo(launch.as_shell())
        return
    raise typer.Exit(run(launches, console=Console(), start_deadline_s=start_deadline, restarts=restarts))


def _secret(explicit: str | None) -> str:
    """Return the secret of this launch; a new one if nobody named one."""
    from kvstrata.remote.protocol.secret import ENVIRONMENT_VARIABLE, load_secret

    if explicit is None and ENVIRONMENT_VARIABLE not in os.environ:
        return secrets.token_hex(32)
    return load_secret(explicit, host="127.0.0.1", knob="--secret").decode()
