"""Which copy engine serves which kind of device."""

from __future__ import annotations

from typing import Any

from kvstrata.move.engine import CopyEngine


def engine_for(device_type: str, **options: Any) -> CopyEngine:
    """The engine for tensors on `device_type`, a torch device type; options go to its constructor.

    "cpu" gives a ThreadEngine. Any other type gives a StreamEngine, which raises UnsupportedError where torch
    finds no such accelerator.
    """
    # Imported here: planning a copy must not cost the compiler's import.
    if device_type == "cpu":
        from kvstrata.move.threads import ThreadEngine

        return ThreadEngine(**options)
    from kvstrata.move.streams import StreamEngine

    return StreamEngine(device_type=device_type, **options)
