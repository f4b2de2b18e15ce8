"""The deterministic engine: when it runs what. What it shares with the others is in the conformance suite."""

from __future__ import annotations

import pytest

from kvstrata.errors import DeadlineExceeded
from kvstrata.move.inline import InlineEngine


def test_nothing_runs_until_somebody_waits() -> None:
    engine = InlineEngine()
    ran: list[str] = []
    first = engine.lane("save").call(lambda: ran.append("first"), name="first")
    second = engine.lane("save").call(lambda: ran.append("second"), name="second")
    assert not first.done()
    assert not second.done()
    assert ran == []
    first.wait(deadline_s=1.0, what="test")
    assert ran == ["first"]
    assert not second.done()


def test_waiting_runs_only_what_the_token_needs() -> None:
    engine = InlineEngine()
    ran: list[str] = []
    saved = engine.lane("save").call(lambda: ran.append("save"), name="save")
    engine.lane("save").call(lambda: ran.append("not needed"), name="later save")
    loaded = engine.lane("load").call(lambda: ran.append("load"), after=[saved], name="load")
    loaded.wait(deadline_s=1.0, what="test")
    assert ran == ["save", "load"]


def test_run_until_idle_runs_every_lane() -> None:
    engine = InlineEngine()
    ran: list[str] = []
    tokens = [engine.lane(name).call(lambda n=name: ran.append(n), name=name) for name in ("a", "b")]
    engine.run_until_idle()
    assert ran == ["a", "b"]
    assert all(token.done() for token in tokens)


def test_a_lane_behind_a_held_one_waits_too() -> None:
    engine = InlineEngine()
    engine.lane("save").held = True
    saved = engine.lane("save").call(lambda: None, name="save")
    loaded = engine.lane("load").call(lambda: None, after=[saved], name="load")
    engine.run_until_idle()
    with pytest.raises(DeadlineExceeded, match="load"):
        loaded.wait(deadline_s=1.0, what="test")
    engine.lane("save").held = False
    loaded.wait(deadline_s=1.0, what="test")
    engine.check_integrity()
