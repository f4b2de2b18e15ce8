"""The knobs of KVPP: each layer's KV persists on one rank of the TP x PCP group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.config_values import Flag, Knobs, Word, knob
from kvstrata.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class KvppConfig(Knobs):
    """KVPP: layers spread over the ranks of a tensor-parallel group."""

    enable_kvpp: bool = knob(
        Flag(), False, "Keep each layer's KV on one rank of the TP x PCP group, and pass it to the others."
    )
    kvpp_broadcast: Literal["referenced", "all"] = knob(
        Word(("referenced", "all")),
        "referenced",
        'What of a layer is passed on: "referenced", the blocks that the step\'s requests have; "all", every '
        "allocated block.",
        section="kvstrata",
    )
    kvpp_transport: Literal["auto", "collective", "shm"] = knob(
        Word(("auto", "collective", "shm")),
        "auto",
        'How: "shm", copied out of the owner\'s shared memory (ranks of one host); "collective", by a '
        'broadcast; "auto", shm where it works.',
        section="kvstrata",
    )

    def _check_together(self) -> None:
        if self.enable_kvpp:
            return
        for name in ("kvpp_broadcast", "kvpp_transport"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise ConfigurationError(
                    f"kvstrata.{name}={value!r} has no effect with enable_kvpp=false; "
                    f"set enable_kvpp to true, or remove kvstrata.{name}"
                )
