"""The process that serves for a library, played by a few lines: what it says wrong, and how often it ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstrata.errors import ConfigurationError, DeadlineExceeded
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.engines import directory, export, owner
from kvstrata.remote.transports.engines.directory import look_up
from kvstrata.remote.transports.engines.export import EngineExporter
from kvstrata.remote.transports.engines.owner import OwnerProcess
from kvstrata.remote.transports.engines.ticket import EngineTicket
from kvstrata.remote.transports.tickets import verify

SECRET = b"of both sides"
LONG_S = 60.0
READ = "import sys, json, base64, time, os\nasked = json.loads(sys.stdin.buffer.readline())\n"
SERVE = """print(json.dumps({"peer": base64.b64encode(str(os.getpid()).encode()).decode(),
    "addresses": [4096 * (at + 1) for at in range(len(asked["regions"]))]}), flush=True)
"""
UNTIL_TOLD = "sys.stdin.buffer.read()\n"


class Library:
    """As much of `EngineLibrary` as the producer's side asks for."""

    name = "played"
    options: dict[str, str] = {}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(owner, "_MODULE", "played_owner")

    def write(source: str) -> None:
        (tmp_path / "played_owner.py").write_text(source)

    return write


@pytest.fixture
def regions() -> Iterator[list[HostRegion]]:
    made = [HostRegion.create(4096, "played", huge_pages=False)]
    yield made
    for region in made:
        region.close()


def started(regions: list[HostRegion]) -> OwnerProcess:
    library: Any = Library()
    return OwnerProcess(library, [(one.fileno(), one.size_bytes) for one in regions], host="127.0.0.1")


def exporter(regions: list[HostRegion]) -> EngineExporter:
    library: Any = Library()
    return EngineExporter(library, regions, HoldTable(), host="127.0.0.1", secret=SECRET)


def ticket_of(made: EngineExporter) -> EngineTicket:
    return verify(made.ticket, EngineTicket, transport="played", secret=SECRET)


def later(known: EngineTicket) -> EngineTicket | None:
    return look_up(known, transport="played", secret=SECRET, deadline_s=LONG_S)


def poll(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("print('a banner', flush=True)\n" + UNTIL_TOLD, "no answer.*print"),
        ("print('{\"peer\": 5}', flush=True)\n" + UNTIL_TOLD, "no answer"),
        ('print(\'{"peer": "", "addresses": [1, 2]}\', flush=True)\n' + UNTIL_TOLD, "2 addresses of 1"),
        ("print('{\"peer\": \"AAA', end='', flush=True)\nos._exit(3)\n", "ended with code 3"),
        ("os.kill(os.getpid(), 9)\n", "ended with code -9"),
        ("while True: sys.stdout.write('x' * 4096)\n", "no answer"),
        ('print(\'{"error": "no such card"}\', flush=True)\n', "cannot serve here: no such card"),
    ],
    ids=["banner", "type", "count", "truncated", "killed", "endless", "refused"],
)
def test_a_first_line_that_is_none_is_a_named_error_and_leaves_no_process(
    play: Callable[[str], None],
    regions: list[HostRegion],
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    error: str,
) -> None:
    monkeypatch.setattr(owner, "CLOSE_S", 0.5)
    play(READ + says)
    made = started(regions)
    with pytest.raises(ConfigurationError, match=error) as caught:
        made.start()
    assert "transfer_backend='played'" in str(caught.value)
    assert not psutil.pid_exists(made._process.pid)


def test_a_process_that_reads_nothing_is_given_up_however_much_it_is_told(
    play: Callable[[str], None], regions: list[HostRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    play("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(owner, "START_S", 0.3)
    monkeypatch.setattr(owner, "CLOSE_S", 0.1)
    made = started(regions)
    made._memory = [(regions[0].fileno(), 4096)] * 50_000  # more than a pipe holds
    with pytest.raises(DeadlineExceeded, match="the start of the played process"):
        made.start()
    assert not psutil.pid_exists(made._process.pid)


def test_what_comes_in_one_piece_with_the_first_line_is_counted_too(
    play: Callable[[str], None], regions: list[HostRegion]
) -> None:
    play(READ + SERVE.replace("print(", "sys.stdout.write(").replace("}), flush=True)", "}) + '\\n3\\n4\\n')")
         + "sys.stdout.flush()\n" + UNTIL_TOLD)  # fmt: skip
    made = exporter(regions)
    try:
        poll(lambda: made.statistics().reads == 4)
        assert made.statistics().owner_ends == 0
    finally:
        made.close()


@pytest.mark.parametrize(
    ("ending", "how"),
    [("os._exit(7)\n", "code 7"), ("print('12 reads', flush=True)\n" + UNTIL_TOLD, "after it had said b'12")],
    ids=["exit", "garbled"],
)
def test_a_process_that_ends_or_talks_nonsense_is_followed_by_another_that_readers_find(
    play: Callable[[str], None],
    regions: list[HostRegion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ending: str,
    how: str,
) -> None:
    monkeypatch.setattr(export, "PAUSE_S", 0.01)
    play(READ + SERVE + "print(5, flush=True)\nsys.stdin.buffer.read(1)\n" + ending)
    made = exporter(regions)
    try:
        first = ticket_of(made)
        assert later(first) is None
        poll(lambda: made.statistics().reads == 5)
        play(READ + SERVE + "print(2, flush=True)\n" + UNTIL_TOLD)
        regions[0].close()  # the engine may have freed it: it is served all the same
        stdin = made._owner._process.stdin
        assert stdin is not None
        os.write(stdin.fileno(), b"x")
        poll(lambda: made.statistics().reads == 7)
        poll(lambda: made.statistics().owner_restarts == 1)
        second = later(first)
        assert second is not None
        assert (second.life, second.region_bytes) == (2, first.region_bytes)
        assert second.export_id != first.export_id
        assert second.peer != first.peer
        assert later(second) is None
        assert made.statistics().owner_ends == 1
        made.check_integrity()
        assert how in caplog.text
        assert "served again" in caplog.text
    finally:
        made.close()
    assert later(first) is None
    assert made.statistics().owner_ends == 1


def test_restarts_are_bounded_and_the_last_word_says_so(
    play: Callable[[str], None],
    regions: list[HostRegion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(export, "PAUSE_S", 0.001)
    play(READ + SERVE + "sys.stdin.buffer.read(1)\n")
    made = exporter(regions)
    play("raise SystemExit(9)\n")
    made._owner._process.kill()
    poll(lambda: not made._thread.is_alive())
    assert "they fail until this engine is started again" in caplog.text
    assert caplog.text.count("follows in") == export.RESTARTS
    assert "ended with code 9" in caplog.text
    statistics = made.statistics()
    assert (statistics.owner_ends, statistics.owner_restarts) == (1, 0)
    made.check_integrity()
    made.close()


def test_closing_ends_a_restart_in_progress(
    play: Callable[[str], None],
    regions: list[HostRegion],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(export, "PAUSE_S", 0.001)
    monkeypatch.setattr(owner, "CLOSE_S", 0.2)
    play(READ + SERVE + "sys.stdin.buffer.read(1)\n")
    made = exporter(regions)
    first = made._owner
    play("import time\ntime.sleep(600)\n")
    first._process.kill()
    poll(lambda: made._owner is not first)
    made.close()
    poll(lambda: not made._thread.is_alive())
    assert not psutil.pid_exists(made._owner._process.pid)
    assert "served again" not in caplog.text
    made.close()


def test_a_record_that_is_torn_forged_or_of_somebody_else_is_none(
    play: Callable[[str], None], regions: list[HostRegion]
) -> None:
    play(READ + SERVE + UNTIL_TOLD)
    made = exporter(regions)
    try:
        known = ticket_of(made)
        page = made._directory._region.tensor().numpy()
        for length in (0, 1 << 40, directory.MAX_TICKET_BYTES, 40):
            page[:8] = list(length.to_bytes(8, "little"))
            assert later(known) is None
        other = exporter(regions)
        made._directory.show(other.ticket)  # signed, and of this very process: but other memory
        assert later(known) is None
        other.close()
    finally:
        made.close()
