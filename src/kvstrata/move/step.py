"""Which blocks one forward reads and which it writes, worked out once and used for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepBlocks:
    """Block ids of one forward: ``load`` holds every request's prefix, ``save`` every block with new rows.

    Whole blocks, for indexer pages are opaque; a block half filled by the prefix is in both.
    """

    load: Int64Array  # unique, ascending
    save: Int64Array  # unique, ascending


def step_blocks(
    query_start_loc: npt.NDArray[np.integer],  # [R + 1]
    seq_lens: npt.NDArray[np.integer],  # [R], new tokens included
    block_table: npt.NDArray[np.integer],  # [R, blocks]
    block_tokens: int,
) -> StepBlocks:
    """Return the blocks of a forward; requests without new tokens (padding) take no part.

    Raises ValueError where a request is longer than its row of the block table.
    """
    new = np.diff(query_start_loc.astype(np.int64))
    end = seq_lens.astype(np.int64)[: new.size]
    active = new > 0
    prefix = np.where(active, end - new, 0)
    end = np.where(active, end, 0)
    table = block_table[: new.size].astype(np.int64)
    last = -(-end // block_tokens)
    if last.size and int(last.max()) > table.shape[1]:
        raise ValueError(f"a request needs {int(last.max())} blocks, its block table has {table.shape[1]}")
    columns = np.arange(int(last.max()) if last.size else 0)
    loads = columns[None, :] < -(-prefix // block_tokens)[:, None]
    saves = (columns[None, :] >= (prefix // block_tokens)[:, None]) & (columns[None, :] < last[:, None])
    used = table[:, : columns.size]
    return StepBlocks(load=np.unique(used[loads]), save=np.unique(used[saves]))
