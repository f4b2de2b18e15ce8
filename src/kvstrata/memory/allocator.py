"""Host memory as a service: allocation, registration with a device, sharing with other processes.

Source: device constraint "allocation, pinning and sharing are backend services".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstrata.errors import BudgetError
from kvstrata.memory.host_memory import available_host_bytes
from kvstrata.memory.region import HostRegion, RegionHandle, open_region

__all__ = [
    "AllocatorStatistics",
    "HostAllocator",
    "HostRegion",
    "Pinner",
    "RegionHandle",
    "SharedMemoryAllocator",
    "open_region",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AllocatorStatistics:
    regions: int
    allocated_bytes: int
    resident_bytes: int
    pinned_bytes: int
    pin_failures: int


class Pinner(Protocol):
    """What an accelerator adds: page-locks memory so that its copy engines can reach it directly."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Raises OSError or RuntimeError where the driver refuses."""
        ...

    def unpin(self, address: int) -> None: ...


class HostAllocator(Protocol):
    """Regions of host memory by name. Any thread may call."""

    def alloc(self, size_bytes: int, name: str) -> HostRegion:
        """Zeroed memory. Raises BudgetError with both numbers, before anything is taken, if it cannot fit."""
        ...

    def register(self, region: HostRegion) -> bool:
        """Pin the region for the device; False if it stays unpinned, which is slower but right.

        Registration is per process: whoever opens a shared region registers it again.
        """
        ...

    def unregister(self, region: HostRegion) -> None:
        """Undo `register`; harmless for a region that is not pinned."""
        ...

    def free(self, region: HostRegion) -> None:
        """Unregister and give the memory up; tensors made from it stay valid."""
        ...

    def shared(self, name: str) -> RegionHandle:
        """What another process passes to `open_region`. Raises KeyError for a name not allocated here."""
        ...

    def statistics(self) -> AllocatorStatistics: ...

    def check_integrity(self) -> None: ...


class SharedMemoryAllocator:
    """Anonymous shared memory (memfd): a crash leaves nothing in /dev/shm, whatever its size.

    `limit_bytes` caps all regions together; `limit_knob` is the knob that a user sets it with, for errors.
    `prefault` takes the memory at allocation. `available_bytes` is passed in by tests.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        limit_knob: str = "host_memory_GB",
        pinner: Pinner | None = None,
        huge_pages: bool = True,
        prefault: bool = False,
        available_bytes: Callable[[], int] = available_host_bytes,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._limit_knob = limit_knob
        self._pinner = pinner
        self._huge_pages = huge_pages
        self._prefault = prefault
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._regions: dict[str, HostRegion] = {}
        self._pinned: set[str] = set()
        self._pin_failures = 0

    def alloc(self, size_bytes: int, name: str) -> HostRegion:
        if size_bytes <= 0:
            raise ValueError(f"host region {name!r}: a size of {size_bytes} bytes makes no sense")
        with self._lock:
            if name in self._regions:
                raise ValueError(f"host region {name!r} exists already")
            self._check_budget(size_bytes, name)
            try:
                region = HostRegion.create(size_bytes, name, huge_pages=self._huge_pages)
                if self._prefault:
                    region.prefault()
            except OSError as error:
                raise BudgetError(
                    f"host region {name!r}: the system refused {size_bytes} bytes ({error}); "
                    f"lower {self._limit_knob}",
                    needed=size_bytes,
                ) from error
            self._regions[name] = region
        logger.info("host region %r: %d bytes of shared memory", name, size_bytes)
        return region

    def register(self, region: HostRegion) -> bool:
        with self._lock:
            self._check_known(region)
            if self._pinner is None:
                return False
            if region.name in self._pinned:
                return True
            try:
                self._pinner.pin(region.address, region.size_bytes)
            except (OSError, RuntimeError) as error:
                self._pin_failures += 1
                logger.warning(
                    "host region %r (%d bytes) stays unpinned, copies to it are slower: %s; "
                    "check the locked-memory limit (ulimit -l)",
                    region.name,
                    region.size_bytes,
                    error,
                )
                return False
            self._pinned.add(region.name)
            return True

    def unregister(self, region: HostRegion) -> None:
        with self._lock:
            self._check_known(region)
            self._unpin(region)

    def free(self, region: HostRegion) -> None:
        with self._lock:
            self._check_known(region)
            self._unpin(region)
            del self._regions[region.name]
        region.close()

    def shared(self, name: str) -> RegionHandle:
        with self._lock:
            return self._regions[name].handle

    def statistics(self) -> AllocatorStatistics:
        with self._lock:
            regions = self._regions.values()
            return AllocatorStatistics(
                regions=len(regions),
                allocated_bytes=sum(region.size_bytes for region in regions),
                resident_bytes=sum(region.resident_bytes for region in regions),
                pinned_bytes=sum(self._regions[name].size_bytes for name in self._pinned),
                pin_failures=self._pin_failures,
            )

    def check_integrity(self) -> None:
        with self._lock:
            assert self._pinned <= self._regions.keys(), "a region is pinned that is not allocated"
            for name, region in self._regions.items():
                assert region.name == name, f"region {region.name!r} is filed under {name!r}"
                assert region.address > 0, f"region {name!r} was closed behind the allocator's back"

    def _check_budget(self, size_bytes: int, name: str) -> None:
        if self._limit_bytes is not None:
            left = self._limit_bytes - sum(region.size_bytes for region in self._regions.values())
            if size_bytes > left:
                raise BudgetError(
                    f"host region {name!r} needs {size_bytes} bytes and {self._limit_knob} leaves {left} of "
                    f"{self._limit_bytes}; raise {self._limit_knob}",
                    needed=size_bytes,
                    available=left,
                )
        # What was promised to earlier regions but not yet touched is not free either.
        promised = sum(max(0, r.size_bytes - r.resident_bytes) for r in self._regions.values())
        available = self._available_bytes() - promised
        if size_bytes > available:
            raise BudgetError(
                f"host region {name!r} needs {size_bytes} bytes and this machine or its control group has "
                f"{available} available; lower {self._limit_knob}, or give the process more memory",
                needed=size_bytes,
                available=available,
            )

    def _check_known(self, region: HostRegion) -> None:
        if self._regions.get(region.name) is not region:
            raise ValueError(f"host region {region.name!r} is not from this allocator, or was freed")

    def _unpin(self, region: HostRegion) -> None:
        if region.name in self._pinned:
            assert self._pinner is not None
            self._pinned.discard(region.name)
            self._pinner.unpin(region.address)
