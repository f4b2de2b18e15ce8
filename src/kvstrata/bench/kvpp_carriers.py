"""KVPP's two carriers below vLLM: layers pass between two processes by shared memory and by broadcast.

The layers are of DeepSeek-V3.2 in bf16 with a live context of 16 K tokens, 21 MB each, three on each rank.
The context lies in every second block, as after some turnover, so that no two of its blocks can be merged.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvstrata.errors import DeadlineExceeded, KVStrataError

if TYPE_CHECKING:
    from kvstrata.move.owner_testing.rank import OwnerRank

RANKS = 2
LAYERS = 6
BLOCK_TOKENS = 64
CONTEXT_TOKENS = 16 * 1024
MAIN_ROW_BYTES = 1152  # 576 bf16 values
INDEXER_ROW_BYTES = 132  # 128 fp8 values and a float32 scale
DEADLINE_S = 300.0  # imports and compiling included, on a machine that does many other things


@dataclass(frozen=True, kw_only=True)
class CarrierRuns:
    """Seconds of every timed forward, in which all layers pass and nothing is computed; they took turns."""

    moved_bytes: int  # that reach a rank in one forward
    shm_s: tuple[float, ...]
    collective_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Bytes a second by shared memory over bytes a second by broadcast, of turns that followed."""
        return [broadcast / shm for broadcast, shm in zip(self.collective_s, self.shm_s, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return median(self.ratios)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for the result file, rates included."""
        return {
            "moved_bytes": self.moved_bytes,
            "shm_s": list(self.shm_s),
            "collective_s": list(self.collective_s),
            "shm_bytes_per_s": [self.moved_bytes / seconds for seconds in self.shm_s],
            "collective_bytes_per_s": [self.moved_bytes / seconds for seconds in self.collective_s],
            "shm_over_collective": self.ratios,
        }


def measure_carriers(*, repeats: int, context_tokens: int = CONTEXT_TOKENS, warm_ups: int = 2) -> CarrierRuns:
    """Time both by turns in two processes; a forward takes as long as its slower rank.

    Raises KVStrataError if a rank fails, DeadlineExceeded if one does not end.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        meeting_place = str(Path(directory) / "meeting")
        pipes, processes = [], []
        for member in range(RANKS):
            pipe, theirs = context.Pipe()
            arguments = (theirs, member, meeting_place, context_tokens, warm_ups, repeats)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(pipe)
        try:
            ranks = [_received(pipe, member) for member, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    shm_s, collective_s = (
        tuple(max(times) for times in zip(*(rank[kind] for rank in ranks), strict=True))
        for kind in ("shm", "collective")
    )
    return CarrierRuns(moved_bytes=int(ranks[0]["bytes"]), shm_s=shm_s, collective_s=collective_s)


def _received(pipe: Connection, member: int) -> dict[str, Any]:
    if not pipe.poll(DEADLINE_S):
        raise DeadlineExceeded(f"rank {member} of the carriers' benchmark", DEADLINE_S)
    try:
        error, measured = pipe.recv()
    except EOFError:
        raise KVStrataError(f"rank {member} of the carriers' benchmark ended without a word") from None
    if error is not None:
        raise KVStrataError(f"rank {member} of the carriers' benchmark failed: {error}")
    return dict(measured)


def _serve(
    pipe: Connection, member: int, meeting_place: str, context_tokens: int, warm_ups: int, repeats: int
) -> None:
    """One rank: both carriers over memory of their own, forwards by turns; says once what they took."""
    try:
        measured = _measure(member, meeting_place, context_tokens, warm_ups, repeats)
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))
        raise
    pipe.send((None, measured))


def _measure(
    member: int, meeting_place: str, context_tokens: int, warm_ups: int, repeats: int
) -> dict[str, Any]:
    import numpy as np
    import torch.distributed as dist

    from kvstrata.move.memcpy import prepare
    from kvstrata.move.step import StepBlocks

    prepare()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=member, world_size=RANKS, timeout=deadline
    )
    blocks = context_tokens // BLOCK_TOKENS
    ranks = {kind: _rank(kind, member, 2 * blocks, deadline) for kind in ("shm", "collective")}
    step = StepBlocks(load=np.arange(0, 2 * blocks, 2, dtype=np.int64), save=np.array([], dtype=np.int64))
    runs: dict[str, list[float]] = {kind: [] for kind in ranks}
    loaded = 0.0
    for run in range(warm_ups + repeats):
        for kind, rank in ranks.items():
            before = rank.statistics()["loaded_bytes"]
            dist.barrier()
            started = time.perf_counter()
            rank.pipeline.begin_step({})
            rank.pipeline.start_forward(step)
            for layer in rank.buffers.execution_order:
                rank.pipeline.acquire(layer, step)
                rank.pipeline.release(layer, step)
            rank.pipeline.end_step()
            if run >= warm_ups:
                runs[kind].append(time.perf_counter() - started)
            loaded = rank.statistics()["loaded_bytes"] - before
    dist.barrier()  # nobody leaves while another may still read its memory
    return {**runs, "bytes": loaded}


def _rank(kind: str, member: int, num_blocks: int, deadline: timedelta) -> OwnerRank:
    import torch.distributed as dist

    from kvstrata.move.broadcast import CollectiveCarrier
    from kvstrata.move.owner_testing.rank import OwnerRank, shm_carrier
    from kvstrata.move.owner_testing.shape import OwnerShape

    def exchange(own: object) -> Sequence[Any]:
        met: list[Any] = [None] * RANKS
        dist.all_gather_object(met, own)
        return met

    def collective_carrier(rank: OwnerRank) -> CollectiveCarrier:
        return CollectiveCarrier(
            plan=rank.plan,
            member=rank.member,
            windows=rank.windows,
            homes=rank.homes,
            group=dist.new_group(list(range(RANKS)), backend="gloo", timeout=deadline),
            engine=rank.engine,
            deadline_s=rank.deadline_s,
        )

    return OwnerRank(
        member=member,
        group_size=RANKS,
        exchange=exchange,
        make=shm_carrier if kind == "shm" else collective_carrier,
        shape=OwnerShape(
            main_bytes=(BLOCK_TOKENS * MAIN_ROW_BYTES,) * LAYERS,
            indexer_bytes=(BLOCK_TOKENS * INDEXER_ROW_BYTES,) * LAYERS,
            num_blocks=num_blocks,
        ),
        deadline_s=DEADLINE_S,
    )
