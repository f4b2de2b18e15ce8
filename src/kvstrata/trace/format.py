"""The file of a recorded trace: a header, then one framed record an event. Little-endian, no pickle.

    file    magic "KVSTRACE", version u32, header bytes u32, header (JSON), crc32 of the header u32
    record  head (`_HEAD`), crc32 of the head u32, payload
    payload rows int64[T, K], fresh rows int64[n], near rows int64[m], request ids (a JSON list)

A record is written at once. What a crash leaves unfinished at the end is shorter than its head says and is
passed over; a checksum that does not fit is damage, and an error.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import KVStrataError
from kvstrata.trace.events import Event, Rewritten, Selection

MAGIC = b"KVSTRACE"
VERSION = 1

_START = struct.Struct("<8sII")  # magic, version, header bytes
# marker, kind, layer, step, T, K, n, m, bytes of the request ids, crc32 of the payload
_HEAD = struct.Struct("<4sIiqIIIIII")
_CRC = struct.Struct("<I")
_MARKER = b"row\n"
_SELECTION, _REWRITTEN = 1, 2
_ALL_LAYERS = -1
_NO_ROWS = np.empty(0, np.int64)


class TraceFormatError(KVStrataError, ValueError):
    """A trace file is damaged, of another version, or no trace at all."""


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """What a reader must know before the first record."""

    topk: int
    block_tokens: int
    host_rows: int
    rank: int = 0


def encode_header(header: TraceHeader) -> bytes:
    """Return the start of a file."""
    text = json.dumps(asdict(header)).encode()
    return _START.pack(MAGIC, VERSION, len(text)) + text + _CRC.pack(zlib.crc32(text))


def read_header(file: BinaryIO, path: Path) -> TraceHeader:
    """Read the start of a file and leave it at the first record; raises TraceFormatError."""
    start = file.read(_START.size)
    if len(start) < _START.size or start[: len(MAGIC)] != MAGIC:
        raise TraceFormatError(f"{path}: not a trace of selected rows; `kvstrata trace record` makes one")
    _, version, length = _START.unpack(start)
    if version != VERSION:
        raise TraceFormatError(f"{path}: trace version {version}; this kvstrata reads version {VERSION}")
    text = file.read(length)
    if file.read(_CRC.size) != _CRC.pack(zlib.crc32(text)):
        raise TraceFormatError(f"{path}: the header is damaged; record the trace again")
    return TraceHeader(**json.loads(text))


def encode(event: Event) -> bytes:
    """Return the record of an event; ValueError if its arrays do not fit one another."""
    if isinstance(event, Rewritten):
        layer = _ALL_LAYERS if event.layer is None else event.layer
        return _record(_REWRITTEN, layer, event.step, (event.rows[np.newaxis], _NO_ROWS, _NO_ROWS), b"")
    ids = event.request_ids
    if ids is not None and len(ids) != len(event.rows):
        raise ValueError(f"{len(ids)} request ids for {len(event.rows)} tokens")
    return _record(
        _SELECTION,
        event.layer,
        event.step,
        (event.rows, event.fresh_rows, event.near_rows),
        b"" if ids is None else json.dumps(ids).encode(),
    )


def _record(
    kind: int,
    layer: int,
    step: int,
    arrays: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    request_ids: bytes,
) -> bytes:
    rows, fresh_rows, near_rows = arrays
    if (rows.ndim, fresh_rows.ndim, near_rows.ndim) != (2, 1, 1):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"rows, fresh rows and near rows of shape {shapes}; they are [T, K], [n] and [m]")
    payload = b"".join([*(np.ascontiguousarray(array, "<i8").tobytes() for array in arrays), request_ids])
    sizes = (*rows.shape, len(fresh_rows), len(near_rows), len(request_ids))
    head = _HEAD.pack(_MARKER, kind, layer, step, *sizes, zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def read_events(file: BinaryIO, path: Path) -> Iterator[Event]:
    """Yield the events from where `file` stands, up to the last whole record; raises TraceFormatError."""
    while True:
        at = file.tell()
        head = file.read(_HEAD.size + _CRC.size)
        if len(head) < _HEAD.size + _CRC.size:
            return
        if head[: len(_MARKER)] != _MARKER or head[_HEAD.size :] != _CRC.pack(zlib.crc32(head[: _HEAD.size])):
            raise TraceFormatError(f"{path}: damaged at byte {at}; record the trace again")
        _, kind, layer, step, tokens, width, fresh, near, ids, crc = _HEAD.unpack_from(head)
        payload_bytes = 8 * (tokens * width + fresh + near) + ids
        payload = file.read(payload_bytes)
        if len(payload) < payload_bytes:
            return
        if zlib.crc32(payload) != crc or kind not in (_SELECTION, _REWRITTEN):
            raise TraceFormatError(f"{path}: damaged at byte {at}; record the trace again")
        numbers = np.frombuffer(payload, "<i8", tokens * width + fresh + near)
        rows, fresh_rows, near_rows = np.split(numbers, (tokens * width, tokens * width + fresh))
        if kind == _REWRITTEN:
            yield Rewritten(step=step, rows=rows, layer=None if layer == _ALL_LAYERS else layer)
        else:
            yield Selection(
                layer=layer,
                step=step,
                rows=rows.reshape(tokens, width),
                fresh_rows=fresh_rows,
                near_rows=near_rows,
                request_ids=tuple(json.loads(payload[8 * len(numbers) :])) if ids else None,
            )
