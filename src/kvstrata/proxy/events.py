"""Server-sent events, as far as a proxy must read them: where one ends, and what its data is."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
_END = re.compile(rb"\r?\n\r?\n")


async def split_events(chunks: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    """Yield whole events with their empty line, byte for byte as they came; what is left at the end, too.

    Raises ValueError for an event of more than `most_bytes`.
    """
    pending = b""
    async for chunk in chunks:
        searched = max(0, len(pending) - 3)  # an end may lie across two chunks
        pending += chunk
        start = 0
        while end := _END.search(pending, max(start, searched)):
            yield pending[start : end.end()]
            start = end.end()
        pending = pending[start:]
        if len(pending) > most_bytes:
            raise ValueError(f"an event of more than {most_bytes} bytes")
    if pending.strip():
        yield pending


def data_of(event: bytes) -> bytes | None:
    """Return an event's data; None for a comment."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def error_in(data: bytes) -> dict[str, Any] | None:
    """Return the error object if that is what the data is."""
    if not data.startswith((b'{"error"', b'{ "error"')):  # spares parsing every token
        return None
    try:
        error = msgspec.json.decode(data).get("error")
    except msgspec.MsgspecError:
        return None
    return error if isinstance(error, dict) else None
