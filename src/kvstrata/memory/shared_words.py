"""Words in shared memory that processes wait for: one writer a word, only counting up, no lock.

An aligned 8-byte store is never seen half done; what a process did before it is ordered by `order_memory`, so
that whoever sees the word sees what it speaks of. Tried on x86-64; arm64 orders memory more loosely and is
untested.
"""

from __future__ import annotations

import threading

FIRST_PAUSE_S = 20e-6


def order_memory() -> None:
    """Keep memory accesses before this call before those after it, as another process sees them.

    A released lock orders what came before, a taken one what comes after; so a release and a take in this
    order let nothing pass. On x86-64 stores are in order anyhow.
    """
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def next_pause_s(pause_s: float, *, longest_s: float) -> float:
    """The pause after one of `pause_s`: 0 at first, to give way once, then ever longer.

    Who is waited for may need this very core.
    """
    return min(longest_s, max(FIRST_PAUSE_S, 2 * pause_s))
