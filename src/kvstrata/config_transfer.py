"""The knobs of remote read between a prefill and a decode engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.config_values import Knobs, Line, Optional, Positive, Whole, Word, knob
from kvstrata.errors import ConfigurationError

_SECONDS = Positive(0.1, 86400.0)


@dataclass(frozen=True, kw_only=True)
class TransferConfig(Knobs):
    """Remote read between engines; on where `kv_port` is set."""

    transfer_backend: Literal["auto", "shm", "tcp", "nixl", "mooncake", "memfabric"] = knob(
        Word(("auto", "shm", "tcp", "nixl", "mooncake", "memfabric")),
        "auto",
        'How decode reads prefill\'s memory: "shm" on one host, "tcp" anywhere, "auto" the first that '
        'works; "nixl", "mooncake" and "memfabric" are libraries (docs/data_plane.md).',
    )
    memfabric_transfer_protocol: Literal["sdma", "device_rdma", "device_urma"] = knob(
        Word(("sdma", "device_rdma", "device_urma")), "sdma", "Protocol of MemFabric, equal on both sides."
    )
    kv_port: int | None = knob(
        Optional(Whole(1, 65535)),
        None,
        "First control port of decode, a rank adds dp_rank * tp_size + tp_rank; null: no remote read.",
    )
    remote_role: Literal["auto", "producer", "consumer", "both"] = knob(
        Word(("auto", "producer", "consumer", "both")),
        "auto",
        'Which end of remote read this engine is; "auto": kv_role says it.',
    )
    remote_host: str = knob(
        Line("an address of this machine"),
        "127.0.0.1",
        "Address that control and data ports bind to, and that the other engine is told.",
    )
    remote_secret: str | None = knob(
        Optional(Line("a secret of at least 8 characters", 8)),
        None,
        "Shared with the other engine and the proxy; null: KVSTRATA_REMOTE_SECRET, on loopback else a file.",
    )
    remote_lease_s: float = knob(
        _SECONDS, 10.0, "Seconds after which a silent peer's transfer is over on this side."
    )
    remote_wait_s: float = knob(
        _SECONDS,
        60.0,
        "Seconds that decode waits for prefill to begin before it computes the prompt.",
    )
    remote_read_attempts: int = knob(Whole(1, 100), 3, "How often decode reads a part before it gives up.")

    @property
    def is_on(self) -> bool:
        """Whether this engine takes part in remote read."""
        return self.kv_port is not None

    def _check_together(self) -> None:
        if self.is_on:
            return
        for item in self.knobs():
            value = getattr(self, item.name)
            if item.name.startswith("remote_") and value != item.default:
                raise ConfigurationError(
                    f"{item.name}={value!r} has no effect without kv_port; set kv_port, or remove {item.name}"
                )
