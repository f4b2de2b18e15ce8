"""The kernels of `triton_residency`, untested on a GPU: checked in Triton's interpreter on a CPU only.

That they compile for a GPU is checked too; that is how far it goes without one. One program serves one
table: its threads meet at barriers, wherever one reads what another wrote.

How they differ from the compiled loops of the CPU: of entries that name the same absent row the first one
wins by an atomic minimum, and the priority at which the slots to give away end is found by halving, without
a barrier: in 8 steps for `frequency`, for `lru` in as many as the oldest row's age has bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from kvstrata.core.eviction import FADE_SHIFT, NEAR_CREDIT, SELECTED_CREDIT

_NEAR = tl.constexpr(1)  # marks of a slot during a call; of none 0
_CHOSEN = tl.constexpr(2)
_SELECTED_CREDIT = tl.constexpr(SELECTED_CREDIT)
_NEAR_CREDIT = tl.constexpr(NEAR_CREDIT)
_FADE_SHIFT = tl.constexpr(FADE_SHIFT)
_FADE_ROUND = tl.constexpr((1 << FADE_SHIFT) - 1)
_HUGE = tl.constexpr((1 << 63) - 1)


@triton.jit
def _highest(rows, entries, block: tl.constexpr):
    highest = tl.full((), -1, tl.int64)
    for first in range(0, entries, block):
        at = first + tl.arange(0, block)
        highest = tl.maximum(highest, tl.max(tl.load(rows + at, mask=at < entries, other=-1)))
    return highest


@triton.jit(do_not_specialize=("entries", "near_entries"))
def resolve_kernel(
    rows, entries, near_rows, near_entries, fresh, host_rows, capacity,
    slot_of_row, row_of_slot, priority, totals, marks, absent, order,
    out_slots, load_rows, load_slots, placed_index, placed_slots, counts,
    is_lru: tl.constexpr, has_fresh: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One call of `TritonResidencyTable.resolve`, by one program. Barriers part who writes from who reads.

    What several threads share is read past the first-level cache (.cg): atomics change it elsewhere.
    width is a power of two from the capacity up; block entries are looked at at a time.
    """
    slot = tl.arange(0, width)
    is_slot = slot < capacity
    tl.store(marks + slot, tl.full((width,), 0, tl.int32), mask=is_slot)
    for first in range(0, entries, block):
        at = first + tl.arange(0, block)
        nothing = tl.full((block,), -1, tl.int64)
        tl.store(out_slots + at, nothing.to(tl.int32), mask=at < entries)
        tl.store(load_rows + at, nothing, mask=at < entries)
        tl.store(load_slots + at, nothing, mask=at < entries)
        tl.store(placed_index + at, nothing, mask=at < entries)
        tl.store(placed_slots + at, nothing, mask=at < entries)
    outcome = tl.full((), 0, tl.int64)
    selected = tl.full((), 0, tl.int64)
    missing = tl.full((), 0, tl.int64)
    loads = tl.full((), 0, tl.int64)
    placements = tl.full((), 0, tl.int64)
    evictions = tl.full((), 0, tl.int64)
    distinct = tl.full((), 0, tl.int64)
    highest = tl.maximum(_highest(rows, entries, block), _highest(near_rows, near_entries, block))
    tl.debug_barrier()
    if highest >= host_rows:
        outcome = tl.full((), 1, tl.int64)
    else:
        for first in range(0, near_entries, block):
            at = first + tl.arange(0, block)
            row = tl.load(near_rows + at, mask=at < near_entries, other=-1)
            found = tl.load(slot_of_row + row, mask=row >= 0, other=-1)
            tl.store(marks + found, tl.full((block,), _NEAR, tl.int32), mask=found >= 0)
        tl.debug_barrier()
        # An absent row takes the number of its first entry, moved below -1: the minimum of all its entries.
        for first in range(0, entries, block):
            at = first + tl.arange(0, block)
            row = tl.load(rows + at, mask=at < entries, other=-1)
            found = tl.load(slot_of_row + row, mask=row >= 0, other=-1, cache_modifier=".cg")
            tl.store(marks + found, tl.full((block,), _CHOSEN, tl.int32), mask=found >= 0)
            tl.atomic_min(slot_of_row + row, at - entries - 1, mask=(row >= 0) & (found < 0))
            selected += tl.sum((row >= 0).to(tl.int64))
        tl.debug_barrier()
        for first in range(0, entries, block):
            at = first + tl.arange(0, block)
            row = tl.load(rows + at, mask=at < entries, other=-1)
            claim = tl.load(slot_of_row + row, mask=row >= 0, other=0, cache_modifier=".cg")
            is_first = ((row >= 0) & (claim == at - entries - 1)).to(tl.int64)
            rank = missing + tl.cumsum(is_first) - is_first
            tl.store(absent + rank, row, mask=is_first != 0)
            missing += tl.sum(is_first)
        mark = tl.load(marks + slot, mask=is_slot, other=0, cache_modifier=".cg")
        distinct = missing + tl.sum((mark == _CHOSEN).to(tl.int64))
        tl.debug_barrier()
        if distinct > capacity:
            outcome = tl.full((), 2, tl.int64)
            for start in range(0, missing, block):
                nth = start + tl.arange(0, block)
                missed = tl.load(absent + nth, mask=nth < missing, other=-1, cache_modifier=".cg")
                tl.store(slot_of_row + missed, tl.full((block,), -1, tl.int32), mask=missed >= 0)
        else:
            step = tl.load(totals) + 1
            held = tl.load(row_of_slot + slot, mask=is_slot, other=-1) >= 0
            worth = tl.load(priority + slot, mask=is_slot, other=0)
            if is_lru:
                worth = tl.where(mark == _CHOSEN, step, worth)
            else:
                worth -= (worth + _FADE_ROUND) >> _FADE_SHIFT
                worth += tl.where(mark == _CHOSEN, _SELECTED_CREDIT, 0)
                worth += tl.where(mark == _NEAR, _NEAR_CREDIT, 0)
            tl.store(priority + slot, worth, mask=is_slot)
            # The slots to give are those of lowest (priority, slot) that this call does not select (R3), a
            # free one below all others. First the least priority that enough of them do not exceed ...
            free = tl.sum((is_slot & (held == 0)).to(tl.int64))
            evictions = tl.maximum(missing - free, 0)
            may_go = is_slot & (mark != _CHOSEN)
            key = tl.where(held, worth + 1, 0)
            cut = tl.min(tl.where(may_go, key, _HUGE))
            high = tl.max(tl.where(may_go, key, -1))
            while cut < high:
                middle = (cut + high) >> 1
                if tl.sum((may_go & (key <= middle)).to(tl.int64)) >= missing:
                    high = middle
                else:
                    cut = middle + 1
            # ... then as many of those that have it as are still needed, the lowest slots first.
            below = (may_go & (key < cut)).to(tl.int64)
            tied = (may_go & (key == cut)).to(tl.int64)
            goes = (below != 0) | ((tied != 0) & (tl.cumsum(tied) <= missing - tl.sum(below)))
            is_given = goes.to(tl.int64)
            tl.store(order + tl.cumsum(is_given) - is_given, slot.to(tl.int64), mask=goes)
            tl.debug_barrier()
            for start in range(0, missing, block):
                nth = start + tl.arange(0, block)
                given = nth < missing
                missed = tl.load(absent + nth, mask=given, other=-1, cache_modifier=".cg")
                to = tl.load(order + nth, mask=given, other=0, cache_modifier=".cg")
                victim = tl.load(row_of_slot + to, mask=given, other=-1)
                tl.debug_barrier()  # read by all before any is overwritten
                tl.store(slot_of_row + victim, tl.full((block,), -1, tl.int32), mask=victim >= 0)
                tl.store(slot_of_row + missed, to.to(tl.int32), mask=given)
                tl.store(row_of_slot + to, missed, mask=given)
                credit = tl.full((block,), 0, tl.int64) + (step if is_lru else _SELECTED_CREDIT)
                tl.store(priority + to, credit, mask=given)
                index = tl.full((block,), -1, tl.int32)
                if has_fresh:
                    index = tl.load(fresh + missed, mask=given, other=-1)
                is_placed = (given & (index >= 0)).to(tl.int64)
                is_load = (given & (index < 0)).to(tl.int64)
                spot = placements + tl.cumsum(is_placed) - is_placed
                tl.store(placed_index + spot, index.to(tl.int64), mask=is_placed != 0)
                tl.store(placed_slots + spot, to, mask=is_placed != 0)
                spot = loads + tl.cumsum(is_load) - is_load
                tl.store(load_rows + spot, missed, mask=is_load != 0)
                tl.store(load_slots + spot, to, mask=is_load != 0)
                placements += tl.sum(is_placed)
                loads += tl.sum(is_load)
            tl.debug_barrier()
            for first in range(0, entries, block):
                at = first + tl.arange(0, block)
                row = tl.load(rows + at, mask=at < entries, other=-1)
                found = tl.load(slot_of_row + row, mask=row >= 0, other=-1, cache_modifier=".cg")
                tl.store(out_slots + at, found, mask=at < entries)
    tl.store(counts + 0, outcome)
    tl.store(counts + 1, selected)
    tl.store(counts + 2, loads)
    tl.store(counts + 3, placements)
    tl.store(counts + 4, evictions)
    tl.store(counts + 5, distinct)
    if outcome == 0:
        tl.store(totals + 0, tl.load(totals + 0) + 1)
        tl.store(totals + 1, tl.load(totals + 1) + selected)
        tl.store(totals + 2, tl.load(totals + 2) + loads)
        tl.store(totals + 3, tl.load(totals + 3) + placements)
        tl.store(totals + 4, tl.load(totals + 4) + evictions)
    else:
        tl.store(totals + 6, tl.load(totals + 6) + 1)


@triton.jit(do_not_specialize=("entries",))
def invalidate_kernel(rows, entries, host_rows, slot_of_row, row_of_slot, totals, block: tl.constexpr):
    """One call of `TritonResidencyTable.invalidate`, by one program."""
    if _highest(rows, entries, block) >= host_rows:
        tl.store(totals + 6, tl.load(totals + 6) + 1)
    else:
        taken = tl.full((), 0, tl.int64)
        for first in range(0, entries, block):
            at = first + tl.arange(0, block)
            row = tl.load(rows + at, mask=at < entries, other=-1)
            # Of a row named twice only one entry gets the slot.
            found = tl.atomic_xchg(slot_of_row + row, tl.full((block,), -1, tl.int32), mask=row >= 0)
            taken_here = (row >= 0) & (found >= 0)
            tl.store(row_of_slot + found, tl.full((block,), -1, tl.int64), mask=taken_here)
            taken += tl.sum(taken_here.to(tl.int64))
        tl.store(totals + 5, tl.load(totals + 5) + taken)
