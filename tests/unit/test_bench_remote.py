"""The measurement of reads: what it returns, and that it leaves nothing behind. No time is judged."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading

import pytest

from kvstrata.bench.remote import PAGE_BYTES, TransportRuns, measure_transports


def test_every_kind_ran_as_often_as_asked_and_nothing_is_left() -> None:
    threads = threading.active_count()
    result = measure_transports(repeats=6, pages=3, peers=2)
    runs = result["runs"]
    kinds = [key for key in runs if key.endswith("_s")]
    assert len(kinds) == 7
    assert all(len(runs[kind]) == 6 and min(runs[kind]) > 0 for kind in kinds)
    assert (runs["pages"], runs["page_bytes"], runs["peers"]) == (3, 64 * 1152, 2)
    assert runs["layer_bytes"] == 3 * PAGE_BYTES
    for key in ("shm_over_memcpy", "tcp_over_memcpy", "eight_peers_over_one", "tcp_eight_peers_over_one"):
        assert min(runs[key]) <= result[key] <= max(runs[key])
    assert json.loads(json.dumps(result))["runs"]["memcpy_s"] == list(runs["memcpy_s"])
    assert threading.active_count() == threads
    assert multiprocessing.active_children() == []
    with open("/proc/self/maps") as maps:
        assert "kvstrata-bench" not in maps.read()
    assert not [name for name in os.listdir("/dev/shm") if "bench" in name]


def test_ratios_are_those_of_speeds_so_that_more_is_faster() -> None:
    seconds = {
        "memcpy_s": (1.0, 2.0, 1.0),
        "shm_s": (2.0, 2.0, 4.0),
        "tcp_s": (10.0, 4.0, 5.0),
        "shm_one_peer_s": (8.0, 8.0, 8.0),
        "shm_all_peers_s": (4.0, 2.0, 8.0),
        "tcp_one_peer_s": (8.0, 8.0, 8.0),
        "tcp_all_peers_s": (8.0, 16.0, 4.0),
    }
    runs = TransportRuns(page_bytes=1, pages=1, layer_bytes=1, peers=8, **seconds)
    assert runs.ratios() == {
        "shm_over_memcpy": [0.5, 1.0, 0.25],
        "tcp_over_memcpy": [0.1, 0.5, 0.2],
        "eight_peers_over_one": [2.0, 4.0, 1.0],
        "tcp_eight_peers_over_one": [1.0, 0.5, 2.0],
    }
    result = runs.as_json()
    assert (result["shm_over_memcpy"], result["eight_peers_over_one"]) == (0.5, 2.0)


@pytest.mark.parametrize("repeats", [1, 5])
def test_a_median_is_never_of_fewer_than_five(repeats: int) -> None:
    result = measure_transports(repeats=repeats, pages=1, peers=1)
    assert len(result["runs"]["memcpy_s"]) == 5
