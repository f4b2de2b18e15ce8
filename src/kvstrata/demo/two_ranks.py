"""Two tensor-parallel ranks on this machine: a part of the CPUs for each, or why there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstrata.serve_pd.machine import cpus_to_bind
from kvstrata.serve_pd.plan import BIND_VARIABLE, bind_cpus

RANKS = 2


@dataclass(frozen=True, kw_only=True)
class TwoRanks:
    """Where they run. Ask before the first engine starts: engines bind the threads of their process."""

    environment: Mapping[str, str]  # of the process that starts the engine
    skip_reason: str | None = None

    @classmethod
    def here(cls) -> TwoRanks:
        """Divide the CPUs that this process may use. Where engines use no CPUs, nothing is bound."""
        cpus = cpus_to_bind()
        if len(cpus) == 1:
            cpus = sorted(os.sched_getaffinity(0))  # two threads of one core are better than none
        return cls.on(cpus)

    @classmethod
    def on(cls, cpus: Sequence[int]) -> TwoRanks:
        """Divide `cpus`; none: nothing is bound."""
        if len(cpus) == 1:
            reason = (
                "each of two ranks needs a CPU of its own and this process may use one; two ranks on one "
                "CPU wait for each other most of the time"
            )
            return cls(environment={}, skip_reason=reason)
        return cls(environment={BIND_VARIABLE: bind_cpus(cpus, [RANKS])[0]} if cpus else {})

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the environment for the block, in place of what was there."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def two_rank_arguments(*, kvpp: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `vllm.LLM` needs for two ranks; with `kvpp`, kvstrata's own knobs, KVPP is on."""
    arguments: dict[str, Any] = {"tensor_parallel_size": RANKS}
    if kvpp is not None:
        own = {"kvstrata": dict(kvpp)} if kvpp else {}
        arguments["additional_config"] = {"enable_kvpp": True, **own}
    return arguments
