"""The gather measurement: what it returns, and that it leaves nothing behind. No time is judged."""

from __future__ import annotations

import pytest
import torch

from kvstrata.bench.gather import ROW_BYTES, GatherRuns, measure_gather


def test_every_kind_ran_as_often_as_asked_and_torch_has_its_threads_back() -> None:
    threads = torch.get_num_threads()
    runs = measure_gather(repeats=2, rows=20, pool_bytes=100 * ROW_BYTES)
    assert [len(kind) for kind in (runs.gather_s, runs.memcpy_s, runs.index_select_s)] == [2, 2, 2]
    assert min(runs.gather_s + runs.memcpy_s + runs.index_select_s) > 0
    assert (runs.rows, runs.row_bytes, runs.pool_bytes) == (20, 1152, 115200)
    assert torch.get_num_threads() == threads


def test_ratios_are_those_of_speeds_so_that_more_is_faster() -> None:
    runs = GatherRuns(
        rows=10,
        row_bytes=100,
        pool_bytes=10**6,
        gather_s=(9.0, 2.0, 1.0),
        memcpy_s=(1.0, 1.0, 7.0),
        index_select_s=(6.0, 6.0, 0.1),
    )
    assert runs.gather_over_memcpy == 0.5
    assert runs.gather_over_index_select == 3.0
    assert runs.gather_bytes_per_s == 500.0


@pytest.mark.parametrize("rows", [0, 101])
def test_a_pool_smaller_than_one_run_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows}: a pool of 115200 bytes has 100 rows"):
        measure_gather(repeats=1, rows=rows, pool_bytes=100 * ROW_BYTES)
