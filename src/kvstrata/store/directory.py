"""The files of a store: made once, whole, by whoever comes first; opened by everybody else.

In `store_path`: `kvstrata-store.json` (format and sizes: written last, so that a store without it was
never finished), `kvstrata-arena.bin`, `kvstrata-index/` and `kvstrata.lock`. In `store_spill_path`: one
file, named after the store's path. Files of other names are never touched.

After a restart of the machine a store on disk is made anew: neither arena nor index was synced, so
nobody knows which pages reached the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from dataclasses import dataclass, fields
from pathlib import Path

from kvstrata.errors import ConfigurationError, DeadlineExceeded, StoreFormatError, StoreUnavailable
from kvstrata.memory.processes import boot_id
from kvstrata.store.arena import Arena, create_arena
from kvstrata.store.format import FORMAT_VERSION, GIB, StoreFormat, StoreParameters
from kvstrata.store.index import Index, how_to_clear
from kvstrata.store.integrity import check_index
from kvstrata.store.locks import FileLock, try_lock
from kvstrata.store.records import Extent, Place
from kvstrata.store.spill import SpillFile, create_spill

logger = logging.getLogger(__name__)

_SMALLEST_HEADROOM_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class StoreFiles:
    """The open files of one store in one process."""

    parameters: StoreParameters
    arena: Arena
    spill: SpillFile | None
    index: Index
    lock: FileLock

    def close(self) -> None:
        """No call may be in progress."""
        self.index.close()
        self.arena.close()
        if self.spill is not None:
            self.spill.close()
        self.lock.close()


class StoreDirectory:
    """Creates, opens and deletes a store's files; every step under the store's lock."""

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s
        self._format_path = path / "kvstrata-store.json"
        self._arena_path = path / "kvstrata-arena.bin"
        self._index_path = path / "kvstrata-index"
        self._lock_path = path / "kvstrata.lock"

    def open_or_create(self, wanted: StoreParameters, *, deadline_s: float) -> StoreFiles:
        """Open the store, making it first if there is none.

        Raises `StoreUnavailable` (read-only, full, not permitted), `StoreFormatError` (another version,
        corrupt), `ConfigurationError` (made with other sizes; nothing is changed) and
        `DeadlineExceeded` (somebody else has been making it for `deadline_s`).
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = FileLock(self._lock_path)
        except OSError as error:
            raise self._unavailable("be written to", error) from error
        try:
            with lock.hold("open or create the store", deadline_s):
                found = self._read_format()
                if found is not None and found.boot_id != boot_id():
                    self._refuse_if_in_use()  # by another machine that shares the file system
                    logger.warning(
                        "the store in %s dates from before the machine restarted; it starts empty", self._path
                    )
                    self._delete_files(found)
                    found = None
                if found is None:
                    found = self._create(wanted)
                self.check_agreement(found.parameters, wanted)
                return self._open(found, lock)
        except BaseException:
            lock.close()
            raise

    def open_existing(self, *, deadline_s: float) -> StoreFiles:
        """Open the store with the sizes it has; `StoreUnavailable` when there is none. Creates nothing."""
        if not self._format_path.exists():
            raise StoreUnavailable(f"store_path={self._path} holds no store. Fix: name a store's directory.")
        found = self._read_format()
        assert found is not None
        return self.open_or_create(found.parameters, deadline_s=deadline_s)

    def delete(self) -> None:
        """Delete the store's files, readable or not; others in the directory stay.

        The lock file, which is empty, stays too: a process that waits for it must find the same file as
        those that come later. Raises `StoreUnavailable` when there is no store, when a process still
        uses it, and when it may not be deleted.
        """
        if not any(path.exists() for path in (self._format_path, self._arena_path, self._index_path)):
            raise StoreUnavailable(f"store_path={self._path} holds no store. Fix: name a store's directory.")
        try:
            lock = FileLock(self._lock_path)
            try:
                with lock.hold("delete the store", self._lock_timeout_s):
                    self._refuse_if_in_use()
                    try:
                        found = self._read_format()
                    except StoreFormatError:
                        found = None
                    self._delete_files(found)
            finally:
                lock.close()
        except DeadlineExceeded:
            raise
        except OSError as error:
            raise self._unavailable("be deleted", error) from error

    def _create(self, wanted: StoreParameters) -> StoreFormat:
        self._delete_files(None)  # leftovers of a creator that was killed
        made = StoreFormat(
            version=FORMAT_VERSION, store_id=uuid.uuid4().hex, boot_id=boot_id(), parameters=wanted
        )
        ours: StoreFormat | None = None  # set once the spill file is known to be nobody else's
        try:
            headroom_bytes = max(_SMALLEST_HEADROOM_BYTES, wanted.size_bytes // 64)  # for the index
            create_arena(self._arena_path, wanted.size_bytes, headroom_bytes)
            self._create_spill(made)
            ours = made
            self._index_path.mkdir(mode=0o700)
            self._fill_index(made)
            draft = self._format_path.with_suffix(".json.creating")
            draft.write_text(made.to_json())
            os.replace(draft, self._format_path)
        except BaseException as error:
            self._delete_files(ours)
            if isinstance(error, OSError) and not isinstance(error, DeadlineExceeded):
                size = f"store_size_GB={wanted.size_bytes / GIB:g} GiB"
                raise self._unavailable(f"take {size}", error) from error
            raise
        return made

    def _create_spill(self, made: StoreFormat) -> None:
        path = self._spill_path(made.parameters)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_spill(path, made.parameters.spill_size_bytes, made.store_id)
        except OSError as error:
            raise StoreUnavailable(
                f"store_spill_path={path.parent} cannot take store_spill_size_GB="
                f"{made.parameters.spill_size_bytes / GIB:g} GiB: {error.strerror}. Fix: lower "
                "store_spill_size_GB, or name a directory with room that may be written."
            ) from error

    def _fill_index(self, made: StoreFormat) -> None:
        # A lock file of its own: the store's lock is held by whoever creates the store.
        own_lock = FileLock(self._index_path / "creating.lock")
        index = Index(self._index_path, made.parameters.index_bytes, own_lock, self._lock_timeout_s)
        try:
            with index.write("create the index") as changes:
                changes.set_store_id(made.store_id.encode())
                for place, size_bytes in (
                    (Place.ARENA, made.parameters.size_bytes),
                    (Place.SPILL, made.parameters.spill_size_bytes),
                ):
                    if size_bytes > 0:
                        changes.free(place).give_back((Extent(0, size_bytes),))
                changes.counters.free_bytes = made.parameters.size_bytes
                changes.counters.spill_free_bytes = made.parameters.spill_size_bytes
        finally:
            index.close()
            own_lock.close()
        # lmdb maps its lock file: with no memory behind it, a file system that fills up later would end
        # readers with SIGBUS. Only now, because closing any descriptor of it drops lmdb's locks.
        with open(self._index_path / "lock.mdb", "r+b") as readers:
            os.posix_fallocate(readers.fileno(), 0, os.fstat(readers.fileno()).st_size)

    def _open(self, found: StoreFormat, lock: FileLock) -> StoreFiles:
        parameters = found.parameters
        arena: Arena | None = None
        spill: SpillFile | None = None
        index: Index | None = None
        try:
            arena = Arena(self._arena_path, parameters.size_bytes)
            # Says to `delete` that somebody is here; the kernel forgets it when the process ends.
            if not try_lock(arena.descriptor, exclusive=False):
                raise StoreUnavailable(f"store_path={self._path} is being deleted. Fix: try again.")
            spill_path = self._spill_path(parameters)
            if spill_path is not None:
                spill = SpillFile(spill_path, parameters.spill_size_bytes, found.store_id)
            if not (self._index_path / "data.mdb").exists():
                raise ValueError("the index is not there")
            index = Index(self._index_path, parameters.index_bytes, lock, self._lock_timeout_s)
            with index.read() as view:
                if view.store_id != found.store_id.encode():
                    raise ValueError("the index belongs to another store")
                if index.was_short:
                    check_index(
                        view,
                        self._path,
                        capacity_bytes=parameters.size_bytes,
                        spill_bytes=parameters.spill_size_bytes,
                    )
            return StoreFiles(parameters=parameters, arena=arena, spill=spill, index=index, lock=lock)
        except BaseException as error:
            for opened in (index, spill, arena):
                if opened is not None:
                    opened.close()
            if isinstance(error, FileNotFoundError | ValueError):
                raise StoreFormatError(
                    f"the store in {self._path} is corrupt: {error}. {how_to_clear(self._path)}"
                ) from error
            if isinstance(error, OSError):
                raise self._unavailable("be opened", error) from error
            raise

    def check_agreement(self, found: StoreParameters, wanted: StoreParameters) -> None:
        """Raise `ConfigurationError`, naming both, when a store was made with other parameters."""
        for field in fields(StoreParameters):
            has, asked = getattr(found, field.name), getattr(wanted, field.name)
            if has == asked:
                continue
            knob = _KNOBS[field.name]
            if field.name != "spill_directory":
                has, asked = f"{has / GIB:g} GiB ({has} bytes)", f"{asked / GIB:g} GiB ({asked} bytes)"
            raise ConfigurationError(
                f"the store in store_path={self._path} was made with {knob} = {has}, and {asked} "
                f"is asked for. Fix: set {knob} to what it has, use another store_path, or make it anew "
                f"after `kvstrata store clear --path {self._path} --delete`."
            )

    def _read_format(self) -> StoreFormat | None:
        try:
            text = self._format_path.read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unavailable("be read", error) from error
        except UnicodeDecodeError as error:
            raise StoreFormatError(
                f"{self._format_path} is corrupt ({error}). {how_to_clear(self._path)}"
            ) from error
        return StoreFormat.from_json(text, self._format_path)

    def _spill_path(self, parameters: StoreParameters) -> Path | None:
        """Named after the store's path: two stores may share a directory, and a new store takes over the
        file of one whose memory is gone."""
        if parameters.spill_directory is None:
            return None
        name = hashlib.blake2b(os.path.realpath(self._path).encode(), digest_size=8).hexdigest()
        return Path(parameters.spill_directory) / f"kvstrata-spill-{name}.bin"

    def _delete_files(self, found: StoreFormat | None) -> None:
        # The record goes first: without it, what is left is a leftover and no store.
        for path in (
            self._format_path,
            self._format_path.with_suffix(".json.creating"),
            self._arena_path,
            None if found is None else self._spill_path(found.parameters),
        ):
            if path is not None:
                path.unlink(missing_ok=True)
        if self._index_path.exists():
            shutil.rmtree(self._index_path)

    def _refuse_if_in_use(self) -> None:
        try:
            descriptor = os.open(self._arena_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not try_lock(descriptor, exclusive=True):
                raise StoreUnavailable(
                    f"store_path={self._path} is in use by a running process. Fix: stop the engines that use "
                    "it first, or leave out --delete to drop only what is in it."
                )
        finally:
            os.close(descriptor)

    def _unavailable(self, doing: str, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(
            f"store_path={self._path} cannot {doing}: {error.strerror or error}. Fix: lower store_size_GB, "
            "free room there, or set store_path to a directory with room that may be written."
        )


_KNOBS = {
    "size_bytes": "store_size_GB",
    "spill_directory": "store_spill_path",
    "spill_size_bytes": "store_spill_size_GB",
}
