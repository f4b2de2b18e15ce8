"""What is said of a pool that is down, and how often."""

from __future__ import annotations

import logging

import pytest

from kvstrata.store.pool.mooncake import _status
from kvstrata.store.pool.seldom import EVERY_S, SeldomLog


def test_a_warning_is_repeated_seldom_and_says_how_many_were_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [100.0]
    log = SeldomLog(logging.getLogger("kvstrata.test"), clock=lambda: now_s[0])
    for _ in range(1000):
        log.warning("read", "the pool is down")
    log.warning("put", "the pool is full")
    assert [record.getMessage() for record in caplog.records] == ["the pool is down", "the pool is full"]
    now_s[0] += EVERY_S
    log.warning("read", "the pool is still down")
    log.warning("read", "the pool is still down")
    assert caplog.records[-1].getMessage() == "the pool is still down (999 more like it were not logged)"
    now_s[0] += EVERY_S
    log.warning("put", "the pool is full")
    assert caplog.records[-1].getMessage() == "the pool is full"


def test_a_library_that_answers_the_same_code_for_ever_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(1000):
        _status(-600)
        _status(-4711)
    assert len(caplog.records) <= 2
