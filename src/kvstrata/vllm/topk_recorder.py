"""Records the rows that decode selects, for `kvstrata trace`: the knob `kvstrata.topk_trace_path`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from vllm.logger import init_logger

from kvstrata.errors import ConfigurationError
from kvstrata.kernels.selection import Int64Array
from kvstrata.trace.recording import TopkTraceWriter

from .sparse_plan import SparsePlan

logger = init_logger("vllm.kvstrata.trace")


class TopkRecorder:
    """Writes one rank's trace. A disk that fails ends the recording, never the run."""

    def __init__(self, path: Path, plan: SparsePlan, num_blocks: int, *, rank: int) -> None:
        """Raises ConfigurationError where the file cannot be made: who asks for a trace wants one."""
        limits = plan.limits
        try:
            self._writer: TopkTraceWriter | None = TopkTraceWriter(
                path,
                topk=limits.topk,
                block_tokens=limits.block_tokens,
                host_rows=num_blocks * limits.block_tokens,
                rank=rank,
            )
        except OSError as error:
            raise ConfigurationError(
                f"kvstrata.topk_trace_path={str(path)!r}: the trace cannot be begun ({error}); set a path "
                "that can be written, or remove it"
            ) from error
        self._resolves: dict[int, int] = {}  # of each share group's leader
        logger.info("recording selected rows in %s", self._writer.path)

    def resolving(
        self, layer: int, rows: Int64Array, fresh_rows: Int64Array, near_rows: Int64Array | None
    ) -> None:
        """A share group's table is about to resolve `rows`."""
        step = self._resolves[layer] = self._resolves.get(layer, 0) + 1
        if self._writer is None:
            return
        near = np.empty(0, np.int64) if near_rows is None else near_rows
        try:
            self._writer.append(layer=layer, step=step, rows=rows, fresh_rows=fresh_rows, near_rows=near)
        except OSError as error:
            self._give_up(error)

    def rewritten(self, layer: int | None, rows: Int64Array) -> None:
        """Host rows were written; None: of all layers."""
        if self._writer is None or rows.size == 0:
            return
        step = self._resolves.get(layer, 0) if layer is not None else max(self._resolves.values(), default=0)
        try:
            self._writer.rewritten(step=step, rows=rows, layer=layer)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        assert self._writer is not None
        logger.error(
            "recording in %s ended: %s; what was written before is readable", self._writer.path, error
        )
        self.close()
