"""The seeds' two connectors under MultiConnector, made one: one of them must own the data path.

The seeds' launch lists the remote half (`SfaRemoteD2HConnector`) and the store half
(`AscendStoreConnector`) as children of MultiConnector. Both move the same layers, so they cannot each go
their own way: they are merged into one `KVStrataConnector` before any engine object exists, whatever their
order. Inside it the remote half is asked first, and loads come from the store otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvstrata.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvstrata.halves")

REMOTE = "SfaRemoteD2HConnector"
STORE = "AscendStoreConnector"
WHOLE = "KVStrataConnector"
_ROLES = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}


def merge_halves(vllm_config: VllmConfig) -> None:
    """Replace a remote half beside a store half by one connector; called by the platform, idempotent.

    Raises ConfigurationError where both set a knob and disagree, and where a half is listed twice.
    """
    from vllm.config import KVTransferConfig

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "MultiConnector":
        return
    children = transfer.kv_connector_extra_config.get("connectors", [])
    names = [child.get("kv_connector") if isinstance(child, dict) else None for child in children]
    if sorted(name for name in names if name in (REMOTE, STORE)) != sorted((REMOTE, STORE)):
        return
    merged = merged_half(children[names.index(REMOTE)], children[names.index(STORE)])
    others = [child for child, name in zip(children, names, strict=True) if name not in (REMOTE, STORE)]
    if others:
        extra = dict(transfer.kv_connector_extra_config) | {"connectors": [merged, *others]}
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=transfer.kv_role,
            engine_id=transfer.engine_id,
            kv_connector_extra_config=extra,
        )
    else:
        vllm_config.kv_transfer_config = KVTransferConfig(engine_id=transfer.engine_id, **merged)
    logger.info("%s and %s are one %s now, which asks the remote half first", REMOTE, STORE, WHOLE)


def merged_half(remote: Mapping[str, Any], store: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry that does what both entries ask for; the store's role is the connector's."""
    ours = dict(remote.get("kv_connector_extra_config", {}))
    theirs = dict(store.get("kv_connector_extra_config", {}))
    for knob in sorted(ours.keys() & theirs.keys()):
        if ours[knob] != theirs[knob]:
            raise ConfigurationError(
                f"{knob}={ours[knob]!r} of {REMOTE} and {knob}={theirs[knob]!r} of {STORE}: they share one "
                "data path; set it on one of them only, or equal on both"
            )
    role = str(remote.get("kv_role", "kv_both"))
    return {
        "kv_connector": WHOLE,
        "kv_role": store.get("kv_role", role),
        "kv_connector_extra_config": {**theirs, **ours, "remote_role": _ROLES.get(role, "auto")},
    }


def remote_role(kv_role: str | None, configured: str) -> frozenset[str]:
    """Return which ends of remote read an engine is: "producer", "consumer" or both."""
    role = _ROLES.get(kv_role or "", "both") if configured == "auto" else configured
    return frozenset(("producer", "consumer") if role == "both" else (role,))
