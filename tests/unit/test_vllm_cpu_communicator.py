"""Gather and reduce-scatter of unequal shares, between real processes over Gloo."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

DEADLINE_S = 120.0
SIZES = [[3, 3, 3], [1, 5, 2], [4, 0, 1]]


def rows_of(rank: int, rows: int) -> torch.Tensor:
    """Rows that no other rank has: [rows, 4]."""
    return 1000.0 * (rank + 1) + torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4)


def shares(rank: int, sizes: list[int]) -> torch.Tensor:
    """What one rank adds to the rows of all: [sum of sizes, 2]."""
    return (rank + 1) * torch.arange(sum(sizes) * 2, dtype=torch.float32).reshape(-1, 2)


def take_part(rank: int, meeting: str, answers: Any) -> None:
    from kvstrata.vllm.cpu_communicator import KVStrataCpuCommunicator

    members = len(SIZES[0])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=members,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    # Without what vLLM's constructor asks of a whole engine.
    communicator: Any = object.__new__(KVStrataCpuCommunicator)
    communicator.device_group = torch.distributed.group.WORLD
    communicator.world_size, communicator.rank_in_group = members, rank
    answer = []
    for sizes in SIZES:
        own, ids = rows_of(rank, sizes[rank]), torch.full((sizes[rank],), rank, dtype=torch.int32)
        together, whose = communicator.all_gatherv([own, ids], dim=0, sizes=sizes)
        given = shares(rank, sizes)
        apart = communicator.reduce_scatterv(given, dim=0, sizes=sizes)
        answer.append((together.tolist(), whose.tolist(), apart.tolist()))
        assert torch.equal(given, shares(rank, sizes)), "the input changed"
    equal = communicator.all_gatherv(rows_of(rank, 2)), communicator.reduce_scatterv(shares(rank, [2] * 3), 0)
    answers.put((rank, answer, [tensor.tolist() for tensor in equal]))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_get_all_rows_and_each_its_own_rows_of_the_sum(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = str(tmp_path / "meeting")
    members = [context.Process(target=take_part, args=(rank, meeting, answers)) for rank in range(3)]
    for member in members:
        member.start()
    try:
        got = [answers.get(timeout=DEADLINE_S) for _ in members]
        for member in members:
            member.join(DEADLINE_S)
            assert member.exitcode == 0
    finally:
        for member in members:
            member.kill()
    for rank, answer, equal in got:
        for sizes, (together, whose, apart) in zip(SIZES, answer, strict=True):
            assert together == torch.cat([rows_of(r, rows) for r, rows in enumerate(sizes)]).tolist()
            assert whose == [r for r, rows in enumerate(sizes) for _ in range(rows)]
            total = sum(shares(r, sizes) for r in range(3))
            assert apart == total.split(sizes)[rank].tolist()
        assert equal[0] == torch.cat([rows_of(r, 2) for r in range(3)]).tolist()
        assert equal[1] == sum(shares(r, [2] * 3) for r in range(3)).split(2)[rank].tolist()
