"""Which classes a simulated run is built from: the real ones, or those of a mutant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.producer.machine import Producer
from kvstrata.sim.pages import Holds
from kvstrata.sim.reads import Readers

if TYPE_CHECKING:
    from kvstrata.sim.decode import Decode
    from kvstrata.sim.decode_rank import DecodeRank
    from kvstrata.sim.prefill import Prefill
    from kvstrata.sim.prefill_rank import PrefillRank


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A mutant replaces one of them by a subclass with a defect."""

    producer: type[Producer] = Producer
    consumer: type[Consumer] = Consumer
    holds: type[Holds] = Holds
    readers: type[Readers] = Readers
    prefill: type[Prefill]
    prefill_rank: type[PrefillRank]
    decode: type[Decode]
    decode_rank: type[DecodeRank]
