"""One process's hold on a store: its open files, shared by every `LocalStore` of the process.

lmdb's rules make this a fact of the process and not of an object: one environment for each directory
and process, never used across a fork. In vLLM the scheduler's and the worker's connector often live in
one process and are made apart from each other, so both must find the same files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kvstrata.errors import StoreError
from kvstrata.memory.processes import Holder, current_holder
from kvstrata.store.directory import StoreFiles


class Attachment:
    """Files with a count of users. They close when the last user has left and no call is in progress."""

    def __init__(self, files: StoreFiles, table_lock: threading.Lock) -> None:
        self.files = files
        self._table_lock = table_lock
        self.holder: Holder = current_holder()
        self._lock = threading.Lock()
        self._users = 1
        self._calls = 0

    def join(self) -> bool:
        """Become one more user; False when the last one has left. `StoreError` in a forked child."""
        with self._lock:
            if self._users == 0:
                return False
            self.check_process()
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0 and self._calls == 0
        if is_last:
            self._close()

    def call(self) -> AbstractContextManager[None]:
        """Keeps the files open for the length of a call: unmapping memory under a copy is a crash."""
        return _Call(self)

    def begin_call(self) -> None:
        self.check_process()
        with self._lock:
            if self._users == 0:
                raise StoreError("this store was closed")
            self._calls += 1

    def end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            is_last = self._users == 0 and self._calls == 0
        if is_last:
            self._close()

    def check_process(self) -> None:
        """Raise `StoreError` in a forked child."""
        if self.holder.pid != os.getpid():
            raise StoreError(
                "this store was opened before a fork and cannot be used after it. Fix: start processes with "
                "spawn (VLLM_WORKER_MULTIPROC_METHOD=spawn), or open the store only after forking."
            )

    def _close(self) -> None:
        # Nobody may open the same directory before lmdb has let go of it.
        with self._table_lock:
            self.files.close()


class _Call:
    """A context manager without a generator: this is on the path of every copy."""

    __slots__ = ("_attachment",)

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def __enter__(self) -> None:
        self._attachment.begin_call()

    def __exit__(self, *exception: object) -> None:
        self._attachment.end_call()


class Attachments:
    """The stores that this process has open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Attachment] = {}

    def attach(self, path: Path, open_files: Callable[[], StoreFiles]) -> Attachment:
        """The process's hold on the store at `path`, made with `open_files` if there is none."""
        place = os.path.realpath(path)
        with self._lock:
            found = self._open.get(place)
            if found is not None and found.join():
                return found
            made = Attachment(open_files(), self._lock)
            self._open[place] = made
            return made


attachments = Attachments()
"""The only state of this project that belongs to the process: it mirrors lmdb's own rule."""
