"""Spread compiled loops over threads that hold no GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

# Some 0.2 ms of computing: a few times what it costs to start and join a thread.
_WORTH_A_THREAD = 4 << 20


def worth_threads(multiply_adds: int) -> bool:
    """Whether `run_shares` would spread so much work over more than the calling thread."""
    return multiply_adds >= 2 * _WORTH_A_THREAD


def run_shares(
    kernel: Callable[..., None], arguments: tuple[Any, ...], *, shares: int, multiply_adds: int
) -> None:
    """Call kernel(worker, workers, *arguments) for every worker, the caller being worker 0; wait for all.

    Worker i of n takes shares i, i + n, i + 2n ... There are at most torch's own thread count of
    workers, and one for each _WORTH_A_THREAD of the multiply_adds to be done. Threads live for one call
    and leave nothing behind that could spin beside torch's pool. The first failure of any worker is
    raised here.
    """
    workers = max(1, min(shares, torch.get_num_threads(), multiply_adds // _WORTH_A_THREAD))
    if workers == 1:
        kernel(0, 1, *arguments)
        return
    failures: list[BaseException] = []
    cpus = pool_cpus() if _bound_to_fewer(workers) else set()

    def helper(worker: int) -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
            kernel(worker, workers, *arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=helper, args=(i,), daemon=True) for i in range(1, workers)]
    for thread in threads:
        thread.start()
    try:
        kernel(0, workers, *arguments)
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def pool_cpus() -> set[int]:
    """The CPUs that this process computes on; empty where the system does not tell.

    vLLM binds each OpenMP thread to one CPU and the caller is one of them: a thread started by it would
    inherit that single CPU. The CPUs of the other threads bound alike are the pool's.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set()
    own = os.sched_getaffinity(0)
    pool = set(own)
    for task in os.listdir("/proc/self/task"):
        try:
            cpus = os.sched_getaffinity(int(task))
        except ProcessLookupError:
            continue
        if len(cpus) == len(own):
            pool |= cpus
    return pool


def _bound_to_fewer(workers: int) -> bool:
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < workers
