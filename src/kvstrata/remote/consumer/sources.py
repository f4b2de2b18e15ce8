"""Whom a decode rank can read from: what each producer said in the Hello that was accepted."""

from __future__ import annotations

import logging
from collections import Counter

from kvstrata.remote.consumer.read_planner import ReadPlanner, ReadSource
from kvstrata.remote.protocol.handshake import Mismatch
from kvstrata.remote.protocol.messages import Hello

logger = logging.getLogger("vllm.kvstrata.remote")


class Sources:
    """By the identity under which a producer speaks.

    A machine judges a Hello by `check_hello`, and asks only later to give up the life before: `keep` comes
    between the two.
    """

    def __init__(self, planner: ReadPlanner) -> None:
        self._planner = planner
        self._by_peer: dict[str, ReadSource] = {}
        self._accepted: ReadSource | None = None  # by the check that ran last
        self._renewed: Counter[str] = Counter()  # lives that are still to be lost, though another is kept

    def check_hello(self, hello: Hello) -> str:
        """Return the transport's name. Raises Mismatch."""
        try:
            self._accepted = self._planner.accept(hello)
        except Mismatch as mismatch:
            logger.warning("prefill rank %d was refused: %s", hello.rank, mismatch.reason)
            raise
        name = self._accepted.transport.name
        logger.info(
            "prefill rank %d of %d (epoch %s) is read over %s", hello.rank, hello.tp_size, hello.epoch, name
        )
        return name

    def keep(self, peer: str) -> None:
        """A message of `peer` was heard: if it was a Hello that was accepted, read from that life now."""
        accepted, self._accepted = self._accepted, None
        if accepted is not None:
            self._renewed[peer] += peer in self._by_peer
            self._by_peer[peer] = accepted

    def get(self, peer: str) -> ReadSource | None:
        """Return how to read from a producer; None if it was lost."""
        return self._by_peer.get(peer)

    def lose(self, peer: str) -> None:
        """A life of the producer is gone: the one that is kept, unless it has taken the place of that one."""
        if self._renewed[peer] > 0:
            self._renewed[peer] -= 1
        else:
            self._by_peer.pop(peer, None)
        self._renewed += Counter()  # drops what is zero
