"""Where a layer's attention meets the data path: acquire before its first cache access, release after.

Hooks are called from inside opaque custom ops, so they run in eager and in compiled mode alike, and they
are silent without attention metadata (profiling, warm-up, dummy runs): no caller calls them then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata


class LayerHook(Protocol):
    """One layer's side of the layer lifecycle (main and indexer cache together)."""

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Make the layer's window safe to write and its prefix present.

        Called before the first access to either cache of the layer in a forward, by whichever op comes
        first (indexer or main KV write); further calls in the same forward change nothing.
        """

    def release(self, metadata: KVStrataMetadata) -> None:
        """Save the layer's new rows and prefetch a later layer; called once attention has read the window."""


class NoHook:
    """The hook of a layer whose home is its window: plain vLLM."""

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Nothing to wait for."""

    def release(self, metadata: KVStrataMetadata) -> None:
        """Nothing to save."""
