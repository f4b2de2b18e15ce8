"""Where the parts of a residency table lie in its one block of memory.

One block, because a compiled function takes longer to receive five arrays than to look two hundred rows up.
The parts that outlive a call come first, then what a call needs: a table grows by a longer end.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from kvstrata.kernels.residency_lanes import LANES

# Totals, int64: counts since construction, what one call leaves to the next, and what never changes.
RESOLVES, SELECTED, LOADS, PLACEMENTS, EVICTIONS, INVALIDATED = range(6)
FREE, CUT = range(6, 8)  # free slots; the priority at which the last call's victims ended
HOST_ROWS, CAPACITY, ENTRIES, IS_LRU = range(8, 12)
TOTALS = 12
# Entries of slot_of_row that are no slots; REWRITTEN since it last had one: the row may be of this step.
ABSENT_ROW, PENDING, REWRITTEN = -1, -2, -3
# Rows of wide, int64; all but the first two are scratch.
ROW_OF_SLOT, LAST_TOUCH, LOAD_ROWS, LOAD_SLOTS, PLACED_INDEX, PLACED_SLOTS = range(6)
WIDE_ROWS = 6
# Rows of bytes, uint8; all but the first are scratch.
COUNT, MARK, KEY, GOES = range(4)
BYTE_ROWS = 4
LEAD = 32  # marks before that of slot 0; the last of them is that of "no slot"
# Rows of small, int32, all of them scratch.
SLOTS, ABSENT = range(2)
SMALL_ROWS = 2


@register_jitable
def sizes(host_rows: int, capacity: int, entries: int) -> tuple[int, int, int, int, int]:
    """Words of 8 bytes that each part takes, in the order in which they lie."""
    return (
        TOTALS,
        (host_rows + 2) // 2,
        WIDE_ROWS * (capacity + LANES),
        (BYTE_ROWS * (LEAD + capacity + LANES) + 7) // 8,
        (SMALL_ROWS * (entries + LANES) + 1) // 2,
    )


@register_jitable
def parts(memory):
    """Views of the parts of a table whose totals say how large it is.

    totals [TOTALS] int64; slot_of_row [1 + host_rows] int32, its entry 0 being that of "no row"; wide
    [WIDE_ROWS, capacity + LANES] int64; octets [BYTE_ROWS, LEAD + capacity + LANES] uint8; small [SMALL_ROWS,
    entries + LANES] int32.
    """
    host_rows, capacity, entries = memory[HOST_ROWS], memory[CAPACITY], memory[ENTRIES]
    totals_words, slot_words, wide_words, octet_words, small_words = sizes(host_rows, capacity, entries)
    at = np.int64(totals_words)
    slot_of_row = memory[at : at + slot_words].view(np.int32)[: 1 + host_rows]
    at += slot_words
    wide = memory[at : at + wide_words].reshape(WIDE_ROWS, capacity + LANES)
    at += wide_words
    width = LEAD + capacity + LANES
    octets = memory[at : at + octet_words].view(np.uint8)[: BYTE_ROWS * width].reshape(BYTE_ROWS, width)
    at += octet_words
    width = entries + LANES
    small = memory[at : at + small_words].view(np.int32)[: SMALL_ROWS * width].reshape(SMALL_ROWS, width)
    return memory[:TOTALS], slot_of_row, wide, octets, small
