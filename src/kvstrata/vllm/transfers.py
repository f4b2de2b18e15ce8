"""What the scheduler tells the workers each step: rows to fetch, blocks to put, transfers between engines."""

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


@dataclass(frozen=True, kw_only=True)
class OpenSend:
    """Prefill: a request came whose prompt a decode engine waits for at ``host``."""

    request_id: str
    transfer: str
    host: str
    kv_port: int
    tp_size: int
    dp_rank: int
    first_block: int
    end_block: int


@dataclass(frozen=True, kw_only=True)
class SendPart:
    """Prefill: when this step ends, ``block_ids`` hold blocks ``first_block..`` of the request in all layers.

    ``is_computed``: they do already, since an earlier step.
    """

    transfer: str
    first_block: int
    block_ids: tuple[int, ...]
    is_last: bool
    is_computed: bool = False


@dataclass(frozen=True, kw_only=True)
class Expect:
    """Decode: fill ``block_ids``, the request's blocks from ``first_block`` on, from a prefill engine."""

    request_id: str
    transfer: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AbortTransfer:
    """Either side: nobody needs this transfer any more, or it cannot go on."""

    transfer: str
    reason: str


@dataclass(kw_only=True)
class RemoteStep:
    """One step's news of transfers between engines; on prefill ``opens`` before ``parts``."""

    opens: list[OpenSend] = field(default_factory=list)
    parts: list[SendPart] = field(default_factory=list)
    expects: list[Expect] = field(default_factory=list)
    aborts: list[AbortTransfer] = field(default_factory=list)


@dataclass
class StepTransfers(KVConnectorMetadata):
    """One step's fetches, puts and transfers between engines; steps are numbered from 1."""

    number: int = 0
    fetches: list[Fetch] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    remote: RemoteStep | None = None
    has_forward: bool = True

    @property
    def imported_block_ids(self) -> list[int]:
        """Blocks whose rows will come from another engine: what is known of their old rows is void."""
        return [
            block for expect in (self.remote.expects if self.remote else ()) for block in expect.block_ids
        ]


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
