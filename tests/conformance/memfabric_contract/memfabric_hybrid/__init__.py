"""A fake of memfabric_hybrid 1.3.0, in as much of it as kvstrata calls: no NPU, one host.

Sessions are found in a folder in place of the config store, and reads are the system's. The signatures are
compared with the wheel's in `test_memfabric_contract.py`.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

_PREFIX = "tcp://fake"
_libc = ctypes.CDLL(None, use_errno=True)


class TransDataOpType(enum.Enum):
    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 4
    DEVICE_URMA = 8
    DEVICE_UBOE = 16


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class TransferEngine:
    def __init__(self) -> None:
        self._session: Path | None = None
        self._role = ""
        self._registered: dict[int, int] = {}

    def get_rpc_port(self) -> int:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return int(free.getsockname()[1])

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        if role not in ("Prefill", "Decode") or not store_url.startswith(_PREFIX) or ":" not in session_id:
            return -1
        assert isinstance(data_op_type, TransDataOpType)
        assert type(device_id) is int
        self._role = role
        self._session = Path(store_url.removeprefix(_PREFIX)) / session_id
        self._publish()
        return 0

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        if self._session is None or capacity <= 0:
            return -1
        self._registered[buffer_addr] = capacity
        self._publish()
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        if self._registered.pop(buffer_addr, None) is None:
            return -1
        self._publish()
        return 0

    def batch_transfer_sync_read(
        self,
        dest_session: str,
        buffers: Sequence[int],
        peer_buffers: Sequence[int],
        lengths: Sequence[int],
        flags: int = 0,
    ) -> int:
        assert len(buffers) == len(peer_buffers) == len(lengths)
        if self._session is None or self._role != "Decode":
            return -1
        try:
            peer = json.loads((self._session.parent / dest_session).read_text())
        except (OSError, ValueError):
            return -1
        for here, there, length in zip(buffers, peer_buffers, lengths, strict=True):
            if not _is_inside(here, length, self._registered.items()):
                return -1
            if not _is_inside(there, length, peer["registered"]) or not _copy(
                peer["pid"], here, there, length
            ):
                return -1
        return 0

    def destroy(self) -> None:
        if self._session is not None:
            self._session.unlink(missing_ok=True)
            self._session = None

    def _publish(self) -> None:
        assert self._session is not None
        said = {"pid": os.getpid(), "registered": list(self._registered.items())}
        new = self._session.with_name(f".{self._session.name}.{os.getpid()}")
        new.write_text(json.dumps(said))
        new.rename(self._session)


def _is_inside(address: int, length: int, registered: object) -> bool:
    return any(at <= address and address + length <= at + size for at, size in registered)  # type: ignore[attr-defined]


def _copy(pid: int, here: int, there: int, length: int) -> bool:
    done = 0
    while done < length:
        local, remote = _Range(here + done, length - done), _Range(there + done, length - done)
        count = _libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            return False
        done += count
    return True
