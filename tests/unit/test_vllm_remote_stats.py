"""Remote read's counts under the keys of the metrics."""

from __future__ import annotations

from kvstrata.vllm.remote_stats import REMOTE_METRICS, added


def test_totals_of_two_sides_add_up_and_what_one_lacks_is_nothing():
    assert added({"stale_messages": 2, "sends_done": 1}, {"stale_messages": 3, "pulls_done": 4}) == {
        "stale_messages": 5,
        "sends_done": 1,
        "pulls_done": 4,
    }
    assert added({}, {}) == {}


def test_every_ending_of_either_side_has_a_series():
    keys = {metric.key for metric in REMOTE_METRICS}
    for ending in ("done", "failed", "aborted", "lapsed", "open"):
        assert {f"sends_{ending}", f"pulls_{ending}"} <= keys
