"""What the scheduler tells the workers each step about the store: rows to fetch and blocks to put."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvstrata.store.base import ReadLease


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Fill ``block_id`` from the store; ``leases`` maps a rank's key to its object's lease."""

    request_id: str
    block_id: int
    leases: Mapping[str, ReadLease]


@dataclass(frozen=True, kw_only=True)
class Put:
    """Offer ``block_id``, complete and confirmed when the step ends, to the store under ``block_hash``."""

    request_id: str
    block_id: int
    block_hash: bytes


@dataclass
class StepTransfers(KVConnectorMetadata):
    """One step's fetches and puts; steps are numbered from 1."""

    number: int = 0
    fetches: list[Fetch] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)


@dataclass(frozen=True)
class StepDone(KVConnectorWorkerMetadata):
    """A worker's answer: it has run step ``number``. vLLM answers for every rank at once.

    Its own output will not do: for a step without tokens it is dropped, unless there is something in it.
    """

    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepDone:
        """Join the answers of two ranks: what both have run."""
        assert isinstance(other, StepDone)
        return StepDone(min(self.number, other.number))
