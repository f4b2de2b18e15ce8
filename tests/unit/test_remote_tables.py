"""docs/protocol.md has the state tables of the code."""

from pathlib import Path

import pytest

from kvstrata.remote.consumer.moves import CONSUMER_MOVES
from kvstrata.remote.producer.moves import PRODUCER_MOVES, ProducerEvent, ProducerState
from kvstrata.remote.protocol.moves import Move, Moves, Resend
from kvstrata.remote.tables import main, render, update

PAGE = Path(__file__).parents[2] / "docs/protocol.md"


def test_the_page_is_what_the_machines_say():
    page = PAGE.read_text()
    assert page == update(page), "run: python -m kvstrata.remote.tables docs/protocol.md"


def test_a_change_of_a_table_would_be_noticed(monkeypatch):
    row = (ProducerState.OPENING, ProducerEvent.ACCEPT)
    monkeypatch.setitem(PRODUCER_MOVES.rows, row, Move(ProducerState.ENDED, "something else"))
    page = PAGE.read_text()
    assert page != update(page)


def test_every_row_has_a_line():
    lines = render().splitlines()
    for moves in (PRODUCER_MOVES, CONSUMER_MOVES):
        for (state, event), move in moves.rows.items():
            assert f"| {state.value} | {event.value} | {move.to.value} | {move.effect} |" in lines


def test_the_command_rewrites_a_page(tmp_path):
    stale = tmp_path / "page.md"
    stale.write_text(PAGE.read_text().replace("| opening |", "| closing |"))
    main(stale)
    assert stale.read_text() == PAGE.read_text()


def test_a_page_without_markers_is_an_error():
    with pytest.raises(ValueError, match="lacks a line"):
        update("# No tables here\n")


def test_every_state_can_be_left_or_is_the_last():
    for moves in (PRODUCER_MOVES, CONSUMER_MOVES):
        assert isinstance(moves, Moves)
        states = {state for state, _ in moves.rows}
        for state in states:
            onward = {move.to for (at, _), move in moves.rows.items() if at is state} - {state}
            assert onward or state.name == "ENDED", state


def test_repeating_gets_slower_and_starts_anew_after_progress():
    resend = Resend(first_s=1.0, slowest_s=3.0)
    resend.start(10.0)
    times = []
    for _ in range(4):
        times.append(resend.due_s)
        resend.again(resend.due_s)
    assert times == [11.0, 13.0, 16.0, 19.0]
    resend.start(20.0)
    assert resend.due_s == 21.0
    resend.stop()
    assert resend.due_s == float("inf")
