"""The loops of `kernels.residency`, compiled; state is plain arrays, calls hold no GIL.

Written for few mispredicted branches and few scattered stores: what is resident and what is not comes in no
order a processor could guess, so loops over entries and slots always store, and only what lies below a
counted end matters. Whatever can be said of eight or more neighbours at once is.

Numba's disk cache notices changes of the file that holds a function, not of those it calls: one who
changes the credits of `core.eviction` or one of the other files of the residency table must touch this one.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=assignment

from __future__ import annotations

import numpy as np
from numba import njit

from kvstrata.core.eviction import FADE_SHIFT, NEAR_CREDIT, SELECTED_CREDIT
from kvstrata.kernels import residency_memory as part
from kvstrata.kernels.residency_lanes import LANES, find_negative
from kvstrata.kernels.residency_memory import LEAD, parts
from kvstrata.kernels.residency_victims import choose, find_cut

# Outcomes of `resolve`; numbers a compiled function can return.
DONE, BAD_ROW, OVERFLOW = 0, 1, 2

_jit = njit(nogil=True, cache=True, error_model="numpy")
_NONE = np.int32(part.ABSENT_ROW)
_PENDING = np.int32(part.PENDING)
_REWRITTEN = np.int32(part.REWRITTEN)
_EXCLUDED = np.uint8(255)  # above every count that fades
_LEAD = np.int64(LEAD)


@_jit
def _bounds(rows):
    """Lowest and highest row, -1 among them."""
    low = high = np.int64(-1)
    for e in range(rows.shape[0]):
        low = min(low, rows[e])
        high = max(high, rows[e])
    return low, high


@_jit
def _out_of_bounds(rows, host_rows):
    """Negative if a row is below -1 or beyond the pool, and maybe if one is far below."""
    signs = np.int64(0)
    for e in range(np.uint64(rows.shape[0])):
        signs |= (host_rows - 1 - rows[e]) | (rows[e] + 1)
    return signs


@_jit
def _mark_near(near, slot_of_row, mark):
    for e in range(np.uint64(near.shape[0])):
        slot = np.int64(slot_of_row[np.uint64(near[e] + 1)])
        mark[np.uint64(slot + _LEAD)] = NEAR_CREDIT


@_jit
def _look_up(rows, slot_of_row, mark, slots):
    """Slots of resident rows, marked as selected."""
    for e in range(np.uint64(rows.shape[0])):
        slot = slot_of_row[np.uint64(rows[e] + 1)]
        slots[e] = slot
        mark[np.uint64(np.int64(slot) + _LEAD)] = SELECTED_CREDIT


@_jit
def _find_first(rows, absent, slot_of_row, first, rewritten):
    """first[:d] = the rows of absent entries, each once, by first occurrence; they count as pending.

    rewritten[:r] = where in `first` those are that were rewritten since they last had a slot. Returns d, r
    and how many absent entries name a row.
    """
    d = r = np.uint64(0)
    named = np.int64(0)
    for i in range(np.uint64(absent.shape[0])):
        row = rows[np.uint64(absent[i])]
        if row >= 0:
            named += 1
            state = slot_of_row[np.uint64(row + 1)]
            if state != _PENDING:
                slot_of_row[np.uint64(row + 1)] = _PENDING
                first[d] = row
                if state == _REWRITTEN:
                    rewritten[r] = d
                    r += np.uint64(1)
                d += np.uint64(1)
    return np.int64(d), np.int64(r), named


@_jit
def _count_distinct(rows, absent, slot_of_row):
    """How many rows the absent entries name; all of them might be of this step afterwards."""
    distinct = 0
    for entry in absent:
        if rows[entry] >= 0:
            distinct += slot_of_row[rows[entry] + 1] != _PENDING
            slot_of_row[rows[entry] + 1] = _PENDING
    for entry in absent:
        if rows[entry] >= 0:
            slot_of_row[rows[entry] + 1] = _REWRITTEN
    return distinct


@_jit
def _first_new(rows, rewritten, fresh):
    """Where the first row of this step is, or how many rows there are."""
    for i in range(np.uint64(rewritten.shape[0])):
        if fresh[np.uint64(rows[np.uint64(rewritten[i])])] >= 0:
            return rewritten[i]
    return rows.shape[0]


@_jit
def _set_where(numbers, chosen, number):
    """numbers[chosen == 255] = number; chosen [n] uint8 is 0 elsewhere. Said so that it needs no branch."""
    for i in range(np.uint64(chosen.shape[0])):
        mask = numbers.dtype.type(np.int8(chosen[i]))
        numbers[i] = (numbers[i] & ~mask) | (numbers.dtype.type(number) & mask)


@_jit
def _assign(rows, slots, absent, to_slots, slot_of_row, row_of_slot):
    """Row i goes to slot to_slots[i], and to slots[absent[i]]."""
    for i in range(np.uint64(to_slots.shape[0])):
        row, slot = rows[i], to_slots[i]
        gone = row_of_slot[np.uint64(slot)]
        # For a free slot this writes the entry of "no row", which is -1 anyway.
        slot_of_row[np.uint64(gone + 1)] = _NONE
        row_of_slot[np.uint64(slot)] = row
        slot_of_row[np.uint64(row + 1)] = slot
        slots[np.uint64(absent[i])] = slot


@_jit
def _split(fresh, wide, begin, end):
    """Part loads from placements, each in their order; how many are loads. Before `begin` all are."""
    load_rows, load_slots = wide[part.LOAD_ROWS], wide[part.LOAD_SLOTS]
    loaded = np.uint64(begin)
    placed = np.uint64(0)
    for i in range(np.uint64(begin), np.uint64(end)):
        row, slot = load_rows[i], load_slots[i]
        index = fresh[np.uint64(row)]
        if index < 0:
            load_rows[loaded] = row
            load_slots[loaded] = slot
            loaded += np.uint64(1)
        else:
            wide[part.PLACED_INDEX, placed] = index
            wide[part.PLACED_SLOTS, placed] = slot
            placed += np.uint64(1)
    return np.int64(loaded)


@_jit
def _touch_by_frequency(count, mark, key):
    # A resident slot's count is stored plus one and never fades below one; a free slot's is zero.
    for slot in range(np.uint64(count.shape[0])):
        faded = np.uint8(count[slot] - (np.uint8(count[slot] + np.uint8(14)) >> np.uint8(FADE_SHIFT)))
        touched = np.uint8(faded + mark[slot])
        count[slot] = touched
        key[slot] = _EXCLUDED if mark[slot] == np.uint8(SELECTED_CREDIT) else touched


@_jit
def _touch_by_step(last_touch, mark, step):
    for slot in range(np.uint64(last_touch.shape[0])):
        mask = -np.int64(mark[slot] == np.uint8(SELECTED_CREDIT))
        last_touch[slot] = (last_touch[slot] & ~mask) | (step & mask)


@_jit
def resolve(rows, near, fresh, memory):
    """One selection. Returns an outcome of the three above, loads, placements, selected, evictions.

    With BAD_ROW and OVERFLOW nothing has changed; the latter gives the distinct rows in place of the loads.
    rows [T, K], near [U, V] int64; fresh [host_rows] int32, or [1] -1; memory as `residency_memory` says.
    """
    rows, near = rows.reshape(-1), near.reshape(-1)
    totals, slot_of_row, wide, octets, small = parts(memory)
    host_rows = totals[part.HOST_ROWS]
    lru = totals[part.IS_LRU]
    if (_out_of_bounds(rows, host_rows) | _out_of_bounds(near, host_rows)) < 0:
        if max(_bounds(rows)[1], _bounds(near)[1]) >= host_rows:
            return BAD_ROW, 0, 0, 0, 0
        rows, near = np.maximum(rows, -1), np.maximum(near, -1)
    capacity = totals[part.CAPACITY]
    mark, slots = octets[part.MARK], small[part.SLOTS]
    mark[: LEAD + capacity] = 0
    if not lru:
        _mark_near(near, slot_of_row, mark)
    _look_up(rows, slot_of_row, mark, slots)
    slots[rows.shape[0] : rows.shape[0] + LANES] = 0
    absent = small[part.ABSENT][: find_negative(slots, rows.shape[0], small[part.ABSENT])]
    if rows.shape[0] > capacity:
        distinct = _count_distinct(rows, absent, slot_of_row)
        for slot in range(capacity):
            distinct += np.int64(mark[LEAD + slot] == SELECTED_CREDIT)
        if distinct > capacity:
            return OVERFLOW, distinct, 0, 0, 0
    # A call's rows and slots stand where its loads will: most of them are loads.
    first, to_slots, rewritten = wide[part.LOAD_ROWS], wide[part.LOAD_SLOTS], wide[part.PLACED_INDEX]
    d, r, named = _find_first(rows, absent, slot_of_row, first, rewritten)
    mark = mark[LEAD : LEAD + capacity]
    selected = rows.shape[0] - absent.shape[0] + named
    totals[part.RESOLVES] += 1
    totals[part.SELECTED] += selected
    goes = octets[part.GOES][:capacity]
    last_touch = wide[part.LAST_TOUCH][:capacity]
    count, key = octets[part.COUNT][:capacity], octets[part.KEY][:capacity]
    if lru:
        _touch_by_step(last_touch, mark, totals[part.RESOLVES])
    else:
        _touch_by_frequency(count, mark, key)
    if d == 0:
        return DONE, 0, 0, selected, 0
    if lru:
        cut = find_cut(last_touch, np.int64(0), totals[part.RESOLVES] - 1, totals[part.CUT] + 1, d)
        choose(last_touch, cut, d, goes)
        _set_where(last_touch, goes, totals[part.RESOLVES])
    else:
        cut = find_cut(key, np.int64(0), np.int64(254), totals[part.CUT], d)
        choose(key, cut, d, goes)
        _set_where(count, goes, SELECTED_CREDIT + 1)
    totals[part.CUT] = cut
    find_negative(octets[part.GOES], capacity, to_slots)
    _assign(first, slots, absent, to_slots[:d], slot_of_row, wide[part.ROW_OF_SLOT])
    if d < absent.shape[0]:
        for i in range(np.uint64(absent.shape[0])):
            entry = np.uint64(absent[i])
            slots[entry] = slot_of_row[np.uint64(rows[entry] + 1)]
    loaded = d
    if fresh.shape[0] == host_rows:
        loaded = _split(fresh, wide, _first_new(first[:d], rewritten[:r], fresh), d)
    evicted = max(d - totals[part.FREE], np.int64(0))
    totals[part.FREE] -= d - evicted
    totals[part.LOADS] += loaded
    totals[part.PLACEMENTS] += d - loaded
    totals[part.EVICTIONS] += evicted
    return DONE, loaded, d - loaded, selected, evicted


@_jit
def invalidate(rows, memory):
    """Free the slots of rows that have one; how many, or -1, nothing changed, for a row beyond the table."""
    totals, slot_of_row, wide, octets, _ = parts(memory)
    if _bounds(rows)[1] >= totals[part.HOST_ROWS]:
        return np.int64(-1)
    taken = np.int64(0)
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0:
            continue
        slot = slot_of_row[row + 1]
        slot_of_row[row + 1] = _REWRITTEN
        if slot >= 0:
            wide[part.ROW_OF_SLOT, slot] = -1
            wide[part.LAST_TOUCH, slot] = 0
            octets[part.COUNT, slot] = 0
            taken += 1
    totals[part.INVALIDATED] += taken
    totals[part.FREE] += taken
    return taken
