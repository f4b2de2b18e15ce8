"""The command lines of one launch, as pure functions of the options, the ports and the CPUs."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.serve_pd.options import EngineOptions, ServeOptions, split_arguments

ENGINE_HOST = "127.0.0.1"
SECRET_VARIABLE = "KVSTRATA_REMOTE_SECRET"
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_CPUS_WORTH_A_SPARE = 4  # of a rank's CPUs one is left for the scheduler and the transfer threads
_HIDDEN = "..."


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process: an engine, or the proxy."""

    name: str
    role: str  # prefill, decode or proxy
    url: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]  # on top of this process's own
    log: Path

    def as_shell(self) -> str:
        """Return what a person would type to start it alone, without the secret."""
        shown = {
            name: _HIDDEN if name == SECRET_VARIABLE else value for name, value in self.environment.items()
        }
        settings = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        return " ".join([*settings, shlex.join(self.argv)])


@dataclass(frozen=True, kw_only=True)
class Ports:
    """One HTTP port an engine, and the first of as many control ports as a decode engine has ranks."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    kv: tuple[int, ...]  # one a decode engine
    proxy: int


def plan_launches(
    options: ServeOptions,
    ports: Ports,
    *,
    cpus: Sequence[int],
    secret: str,
    python: str,
    proxy_command: Sequence[str] | None = None,
) -> tuple[Launch, ...]:
    """Return every process of the launch, engines first. Raises ConfigurationError.

    `cpus` are the CPUs to bind engines to; none: nothing is bound. The secret goes by the environment, which
    other users cannot read.
    """
    ranks = [options.prefill.tp_size] * options.prefill.count + [
        options.decode.tp_size
    ] * options.decode.count
    bindings = bind_cpus(cpus, ranks) if cpus else [None] * len(ranks)
    engines: list[Launch] = []
    roles = (("prefill", options.prefill, ports.prefill), ("decode", options.decode, ports.decode))
    for role, engine, http_ports in roles:
        for number, port in enumerate(http_ports):
            name, bind = f"{role}-{number}", bindings[len(engines)]
            # Every prefill engine may feed every decode engine, which says its ports in its adverts; kv_port
            # of prefill only switches remote read on.
            kv_port = ports.kv[number] if role == "decode" else ports.kv[0]
            engines.append(
                Launch(
                    name=name,
                    role=role,
                    url=f"http://{ENGINE_HOST}:{port}",
                    argv=(python, *engine_arguments(options, role, engine, port, kv_port)),
                    environment={
                        SECRET_VARIABLE: secret,
                        "PYTHONUNBUFFERED": "1",
                        **({} if bind is None else {BIND_VARIABLE: bind}),
                    },
                    log=options.log_directory / f"{name}.log",
                )
            )
    command = (python, "-m", "kvstrata", "proxy") if proxy_command is None else proxy_command
    return (*engines, _proxy(options, ports, engines, secret, command))


def engine_arguments(
    options: ServeOptions, role: str, engine: EngineOptions, port: int, kv_port: int
) -> list[str]:
    """Return what follows `python` on an engine's command line."""
    is_prefill = role == "prefill"
    transfer = options.prefill_config(kv_port) if is_prefill else options.decode_config(kv_port)
    additional = None if is_prefill else options.sparse_config()
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", options.model),
        *("--host", ENGINE_HOST, "--port", str(port)),
        *(("--tensor-parallel-size", str(engine.tp_size)) if engine.tp_size > 1 else ()),
        *("--kv-transfer-config", json.dumps(transfer)),
        *(("--additional-config", json.dumps(additional)) if additional is not None else ()),
        # Last, so that what the user says wins.
        *split_arguments("--engine-args", options.arguments),
        *split_arguments(f"--{role}-args", engine.arguments),
    ]


def _proxy(
    options: ServeOptions, ports: Ports, engines: Sequence[Launch], secret: str, command: Sequence[str]
) -> Launch:
    named = [word for engine in engines for word in (f"--{engine.role}", engine.url)]
    # Engines are on this machine and reach the proxy there, whatever address it serves to others; only an
    # address that is not a wildcard may not be bound on loopback, too.
    is_wildcard = options.host in ("0.0.0.0", "::")
    local = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{ENGINE_HOST if is_wildcard else local}:{ports.proxy}"
    metaserver = ("--metaserver-url", f"{url}/v1/metaserver") if is_wildcard else ()
    return Launch(
        name="proxy",
        role="proxy",
        url=url,
        argv=(
            *command,
            *named,
            *("--host", options.host, "--port", str(ports.proxy), *metaserver),
            *("--deadline", f"{options.deadline_s:g}"),
        ),
        environment={SECRET_VARIABLE: secret, "PYTHONUNBUFFERED": "1"},
        log=options.log_directory / "proxy.log",
    )


def bind_cpus(cpus: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """Split CPUs between engines: one value of VLLM_CPU_OMP_THREADS_BIND for each entry of `ranks`.

    Every rank of every engine gets as many CPUs as any other, or one more. With fewer CPUs than ranks they
    share them in turn.
    """
    total = sum(ranks)
    if len(cpus) < total:
        shares = [[cpus[rank % len(cpus)]] for rank in range(total)]
    else:
        ends = [len(cpus) * rank // total for rank in range(total + 1)]
        shares = [list(cpus[first:end]) for first, end in itertools.pairwise(ends)]
        shares = [share[:-1] if len(share) >= _CPUS_WORTH_A_SPARE else share for share in shares]
    texts = iter(",".join(map(str, share)) for share in shares)
    return ["|".join(next(texts) for _ in range(count)) for count in ranks]


def one_cpu_per_core(cpus: Sequence[int], siblings: Mapping[int, Sequence[int]]) -> list[int]:
    """Return `cpus` without those that share a core with an earlier one, as vLLM binds threads."""
    chosen: list[int] = []
    taken: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in taken:
            chosen.append(cpu)
            taken |= {cpu, *siblings.get(cpu, ())}
    return chosen
