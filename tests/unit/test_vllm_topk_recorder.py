"""A trace of the selected rows: what a file that cannot be written does to a launch, and to a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.trace.recording import TopkTrace, rank_path
from kvstrata.vllm.topk_recorder import TopkRecorder

PLAN: Any = SimpleNamespace(limits=SimpleNamespace(topk=2, block_tokens=4))


def test_a_trace_that_cannot_be_begun_is_named_with_its_knob(tmp_path: Path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run.trace"
    with pytest.raises(ConfigurationError, match=rf"kvstrata.topk_trace_path='{path}'.*set a path"):
        TopkRecorder(path, PLAN, 3, rank=0)


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_run(tmp_path: Path):
    recorder = TopkRecorder(tmp_path / "run.trace", PLAN, 3, rank=0)
    rows, none = np.array([[5, 6]]), np.empty(0, np.int64)
    recorder.resolving(0, rows, none, None)
    assert recorder._writer is not None
    recorder._writer._file = Path("/dev/full").open("wb")  # noqa: SIM115 - closed by the recorder
    for _ in range(2):
        recorder.rewritten(0, np.array([5]))
        recorder.resolving(0, rows, none, None)
    recorder.close()
    trace = TopkTrace(rank_path(tmp_path / "run.trace", 0))
    assert len(list(trace.events())) == 1
