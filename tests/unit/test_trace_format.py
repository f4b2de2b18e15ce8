"""Recorded traces: what is written is read, a torn tail is passed over, damage is an error."""

from pathlib import Path

import numpy as np
import pytest

from kvstrata.trace.events import Event, Rewritten, Selection
from kvstrata.trace.format import TraceFormatError
from kvstrata.trace.recording import TopkTrace, TopkTraceWriter, TraceSummary, rank_path, summarise

FAR = 2**40  # rows are 64-bit all the way


def write(path: Path) -> Path:
    with TopkTraceWriter(path, topk=3, block_tokens=16, host_rows=FAR + 9, rank=2) as writer:
        writer.rewritten(step=5, rows=np.array([7, FAR], np.int64))
        writer.append(
            layer=0,
            step=5,
            rows=np.array([[1, FAR, -1], [4, 7, 2]], np.int64),
            fresh_rows=np.array([7], np.int64),
            near_rows=np.array([[FAR + 8, 0], [3, -1]], np.int64),
            request_ids=["a", "ü\n"],
        )
        writer.append(layer=2, step=5, rows=np.array([[9, 8, 7]], np.int64))
        writer.rewritten(step=6, rows=np.array([3], np.int64), layer=2)
    return writer.path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "a.trace")


def as_plain(event: Event) -> dict[str, object]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(event).items()
    }


EXPECTED = [
    {"step": 5, "rows": [7, FAR], "layer": None},
    {
        "layer": 0,
        "step": 5,
        "rows": [[1, FAR, -1], [4, 7, 2]],
        "fresh_rows": [7],
        "near_rows": [FAR + 8, 0, 3, -1],
        "request_ids": ("a", "ü\n"),
    },
    {
        "layer": 2,
        "step": 5,
        "rows": [[9, 8, 7]],
        "fresh_rows": [],
        "near_rows": [],
        "request_ids": None,
    },
    {"step": 6, "rows": [3], "layer": 2},
]


def test_what_is_written_is_read_back(recorded: Path):
    trace = TopkTrace(recorded)
    assert (trace.topk, trace.host_rows, trace.header.block_tokens, trace.header.rank) == (3, FAR + 9, 16, 2)
    assert [as_plain(event) for event in trace.events()] == EXPECTED
    assert [type(event) for event in trace.events()] == [Rewritten, Selection, Selection, Rewritten]


def test_every_rank_has_a_file_of_its_own(recorded: Path):
    assert recorded.name == "a.rank2.trace"
    assert rank_path(Path("x/a.trace"), 0) != rank_path(Path("x/a.trace"), 1)


def test_a_summary_counts_selections_and_no_padding(recorded: Path):
    assert summarise(TopkTrace(recorded).events()) == TraceSummary(
        selections=2, layers=(0, 2), steps=1, max_tokens=2, selected_rows=8
    )


def test_a_file_cut_anywhere_gives_its_whole_records(recorded: Path, tmp_path: Path):
    whole = recorded.read_bytes()
    cut = tmp_path / "cut.trace"
    counts = []
    start = whole.index(b"row\n")
    for end in range(start, len(whole) + 1):
        cut.write_bytes(whole[:end])
        events = [as_plain(event) for event in TopkTrace(cut).events()]
        assert events == EXPECTED[: len(events)]
        counts.append(len(events))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3, 4}
    assert counts.count(4) == 1  # the last record needs its last byte


def test_any_flipped_byte_is_noticed(recorded: Path, tmp_path: Path):
    whole = recorded.read_bytes()
    damaged = tmp_path / "damaged.trace"
    for at in range(len(whole)):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(TraceFormatError, match=r"damaged\.trace"):
            list(TopkTrace(damaged).events())


def test_records_are_readable_while_the_writer_is_open(tmp_path: Path):
    with TopkTraceWriter(tmp_path / "b.trace", topk=1, block_tokens=16, host_rows=9) as writer:
        for step in range(3):
            writer.append(layer=0, step=step, rows=np.full((1, 1), step, np.int64))
            events = list(TopkTrace(writer.path).events())
            assert [event.step for event in events] == list(range(step + 1))


def test_a_file_that_is_no_trace_says_what_makes_one(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("steps\n")
    with pytest.raises(TraceFormatError, match=r"notes\.txt: .*kvstrata trace record"):
        TopkTrace(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.array([1, 2], np.int64)},
        {"rows": np.zeros((2, 1), np.int64), "fresh_rows": np.zeros((2, 1), np.int64)},
        {"rows": np.zeros((2, 1), np.int64), "request_ids": ["only one"]},
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(tmp_path: Path, wrong: dict[str, object]):
    with TopkTraceWriter(tmp_path / "c.trace", topk=1, block_tokens=16, host_rows=9) as writer:
        with pytest.raises(ValueError, match=r"of shape|request ids"):
            writer.append(layer=0, step=0, **wrong)
        assert list(TopkTrace(writer.path).events()) == []
