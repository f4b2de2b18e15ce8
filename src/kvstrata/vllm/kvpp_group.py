"""The ranks of a KVPP group in vLLM's terms: how they meet at start-up, and which carrier joins them.

Source: seed, KVPP, Usage: within each data-parallel replica and pipeline stage, the TP x PCP ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.logger import init_logger

from kvstrata.config_kvpp import KvppConfig
from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import ConfigurationError, DeadlineExceeded, StoreUnavailable
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.processes import boot_id
from kvstrata.memory.region import HostRegion
from kvstrata.move.broadcast import CollectiveCarrier
from kvstrata.move.carrier import PageTable
from kvstrata.move.engine import CopyEngine
from kvstrata.move.peer_memory import PeerMemoryCarrier

if TYPE_CHECKING:
    from .settings import Settings

logger = init_logger("vllm.kvstrata.kvpp")

OwnerCarrier = PeerMemoryCarrier | CollectiveCarrier


class KvppGroup:
    """This rank's end of its group. All ranks take part in every exchange, in the same order."""

    def __init__(self, *, member: int, ranks: Sequence[int], config: KvppConfig, deadline_s: float) -> None:
        """Meet the others and settle the transport.

        Raises ConfigurationError where it cannot work, DeadlineExceeded where a rank does not come.
        """
        self.member = member
        self._ranks = tuple(ranks)
        self._config = config
        self._deadline_s = deadline_s
        self._has_met = False
        self._process_group = self._new_process_group()
        hosts = set(self._gather((boot_id(), _process_namespace())))
        self.transport = _transport(config, is_one_host=len(hosts) == 1)

    @classmethod
    def of_worker(cls, settings: Settings, *, deadline_s: float) -> KvppGroup:
        """The group of the calling worker: vLLM's tensor-parallel group, for vLLM has no PCP on CPU."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        return cls(
            member=group.rank_in_group,
            ranks=group.ranks,
            config=settings.additional.kvpp,
            deadline_s=deadline_s,
        )

    @contextlib.contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """Tell the others of an error that comes before the carriers meet: they would wait for this rank."""
        try:
            yield
        except Exception as error:
            if not self._has_met:
                self._gather(StoreUnavailable(str(error)))
            raise

    def carrier(
        self,
        *,
        plan: OwnerPlan,
        windows: PageTable,
        homes: PageTable,
        regions: Sequence[HostRegion],
        engine: CopyEngine,
    ) -> OwnerCarrier:
        """Join the ranks, each with its own homes; raises what the carrier raises, alike on all ranks."""
        payload = self._config.kvpp_broadcast
        if self.transport == "shm":
            return PeerMemoryCarrier(
                plan=plan,
                member=self.member,
                windows=windows,
                homes=homes,
                regions=regions,
                exchange=self._exchange,
                engine=engine,
                allocator=SharedMemoryAllocator(),
                deadline_s=self._deadline_s,
                payload=payload,
            )
        self._exchange(None)
        return CollectiveCarrier(
            plan=plan,
            member=self.member,
            windows=windows,
            homes=homes,
            group=self._new_process_group(),
            engine=engine,
            deadline_s=self._deadline_s,
            payload=payload,
        )

    def _exchange(self, own: object) -> list[Any]:
        met = self._gather(own)
        self._has_met = True
        for member, other in enumerate(met):
            if isinstance(other, Exception):
                raise StoreUnavailable(f"rank {member} of the KVPP group could not start: {other}") from other
        return met

    def _gather(self, own: object) -> list[Any]:
        met: list[Any] = [None] * len(self._ranks)
        with self._named():
            torch.distributed.all_gather_object(met, own, group=self._process_group)
        return met

    def _new_process_group(self) -> Any:
        """Make a group of these ranks whose waits end: vLLM's own wait for half an hour."""
        with self._named():
            return torch.distributed.new_group(
                list(self._ranks),
                backend="gloo",
                timeout=datetime.timedelta(seconds=self._deadline_s),
                use_local_synchronization=True,
            )

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch.distributed, whose own words name no rank
            what = f"rank {self.member} meeting the other ranks of its KVPP group at start-up ({error})"
            raise DeadlineExceeded(what, self._deadline_s) from error


def _process_namespace() -> str:
    """Memory is shared by process and descriptor, so one host means one set of process numbers, too."""
    return os.readlink("/proc/self/ns/pid")


def _transport(config: KvppConfig, *, is_one_host: bool) -> Literal["shm", "collective"]:
    chosen = config.kvpp_transport
    if chosen == "shm" and not is_one_host:
        raise ConfigurationError(
            'kvstrata.kvpp_transport="shm" with ranks on several hosts: they have no memory in common; set '
            'it to "auto" or "collective"'
        )
    if chosen == "auto":
        chosen = "shm" if is_one_host else "collective"
        logger.info(
            "kvpp_transport is %r: all ranks are on %s",
            chosen,
            "one host" if is_one_host else "several hosts",
        )
    return chosen
