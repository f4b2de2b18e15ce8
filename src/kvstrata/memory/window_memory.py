"""Places an engine's KV cache in memory that other processes can read; to the engine it is a plain tensor.

vLLM allocates its whole cache by one `torch.zeros(size, dtype=torch.int8, device=device)`, inside the context
that a connector gives it. On the CPU such a tensor is private memory; here it becomes a `HostRegion`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvstrata.memory.allocator import HostAllocator
from kvstrata.memory.region import HostRegion

logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
"""Smaller tensors are not caches and stay where they are."""


class SharedWindowMemory(TorchFunctionMode):
    """A context: `torch.zeros(n, dtype=torch.int8)` of `min_bytes` or more on the CPU gives shared memory.

    Any other call, and any on another device, goes through untouched. Raises what the allocator raises, from
    inside `torch.zeros`. Enter it in one thread, as often as needed; the regions add up.
    """

    def __init__(
        self, allocator: HostAllocator, *, name: str = "kv-cache", min_bytes: int = MIN_BYTES
    ) -> None:
        super().__init__()
        self._allocator = allocator
        self._name = name
        self._min_bytes = min_bytes
        self._lock = threading.Lock()
        self._regions: list[HostRegion] = []

    @property
    def regions(self) -> tuple[HostRegion, ...]:
        """What was allocated so far, in order; one for each tensor."""
        with self._lock:
            return tuple(self._regions)

    def close(self) -> None:
        """Give the regions up; tensors in them stay valid. Closing twice is harmless."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            self._allocator.free(region)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        size = _bytes_of(func, args, kwargs)
        if size is None or size < self._min_bytes:
            return func(*args, **kwargs)
        with self._lock:
            region = self._allocator.alloc(size, f"{self._name}-{len(self._regions)}")
            self._regions.append(region)
        logger.info("%d bytes of %s lie in shared memory", size, self._name)
        return region.tensor().view(torch.int8)


def _bytes_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many bytes a call asks for that is a cache's allocation on the CPU; None for any other call."""
    if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
        return None
    if kwargs.keys() - {"dtype", "device", "size"} or len(args) + ("size" in kwargs) != 1:
        return None
    device = kwargs.get("device")
    if torch.device(torch.get_default_device() if device is None else device).type != "cpu":
        return None
    size = args[0] if args else kwargs["size"]
    if isinstance(size, list | tuple | torch.Size) and len(size) == 1:
        size = size[0]
    return size if isinstance(size, int) else None
