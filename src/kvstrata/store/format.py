"""What a store was made with: the parameters that all its users share, and the record that keeps them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstrata.errors import ConfigurationError, StoreFormatError
from kvstrata.store.extents import GRANULE_BYTES
from kvstrata.store.index import how_to_clear

FORMAT_VERSION = 1
_SMALLEST_INDEX_BYTES = 64 << 20  # address space, not memory: lmdb's file grows as it fills
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StoreParameters:
    """What every process that opens a store has to agree on. Sizes in whole granules."""

    size_bytes: int
    spill_directory: str | None
    spill_size_bytes: int

    @classmethod
    def checked(
        cls, size_bytes: int, spill_path: str | Path | None, spill_size_bytes: int
    ) -> StoreParameters:
        """From a user's values, rounded down to granules; raises `ConfigurationError`."""
        if size_bytes < GRANULE_BYTES:
            raise ConfigurationError(
                f"store_size_GB gives the store {size_bytes} bytes; it needs at least {GRANULE_BYTES}. "
                "Fix: raise store_size_GB."
            )
        if (spill_path is None) != (spill_size_bytes == 0):
            raise ConfigurationError(
                f"store_spill_path={spill_path} and store_spill_size_GB (= {spill_size_bytes} bytes) go "
                "together. Fix: set both, or neither."
            )
        if spill_path is not None and spill_size_bytes < GRANULE_BYTES:
            raise ConfigurationError(
                f"store_spill_size_GB gives {spill_size_bytes} bytes; it needs at least {GRANULE_BYTES}. "
                "Fix: raise store_spill_size_GB, or remove store_spill_path."
            )
        return cls(
            size_bytes=size_bytes // GRANULE_BYTES * GRANULE_BYTES,
            spill_directory=None if spill_path is None else os.path.realpath(spill_path),
            spill_size_bytes=spill_size_bytes // GRANULE_BYTES * GRANULE_BYTES,
        )

    @property
    def index_bytes(self) -> int:
        """Address space for the index: one-granule objects would take an eighth of what they describe."""
        return max(_SMALLEST_INDEX_BYTES, (self.size_bytes + self.spill_size_bytes) // 8)


@dataclass(frozen=True, kw_only=True)
class StoreFormat:
    """The contents of `kvstrata-store.json`."""

    version: int
    store_id: str
    boot_id: str
    parameters: StoreParameters

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> StoreFormat:
        """Raises `StoreFormatError` for another version, and for text that is no such record."""
        try:
            found = json.loads(text)
            version = found["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreFormatError(f"{path} is corrupt ({error!r}). {how_to_clear(path.parent)}") from error
        if version != FORMAT_VERSION:
            raise StoreFormatError(
                f"the store in {path.parent} has format version {version}; this kvstrata reads "
                f"{FORMAT_VERSION}. {how_to_clear(path.parent)}"
            )
        try:
            parameters = StoreParameters(**found.pop("parameters"))
            sizes = (parameters.size_bytes, parameters.spill_size_bytes)
            if not all(isinstance(size, int) and size % GRANULE_BYTES == 0 for size in sizes):
                raise TypeError(f"sizes {sizes}")
            return cls(parameters=parameters, **found)
        except (TypeError, KeyError) as error:
            raise StoreFormatError(f"{path} is corrupt ({error!r}). {how_to_clear(path.parent)}") from error
