"""A prefill and a decode engine that tests may stop and kill: the next test finds both in order again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines import sparse
from pd import Fleet, Pair, assert_at_rest, free_port, remote, wait_for
from pd_engine import PdEngine
from pd_reads import HOLD, PASS

WAIT_S = 20.0  # decode computes a prompt that no prefill has begun by then
CHUNK = 48
STEPS = 2  # that a paused prefill takes of a prompt


class World:
    """One engine each; whoever is dead is started again when a pair is asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        layers = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
        self.prefill_arguments = {
            **remote("producer", remote_wait_s=WAIT_S, **layers),
            "max_num_batched_tokens": CHUNK,
        }
        self.decode_arguments = {
            **remote("consumer", free_port(), remote_wait_s=WAIT_S),
            **sparse(buffer=32),
        }
        self._prefill: PdEngine | None = None
        self._decode: PdEngine | None = None

    def pair(self) -> Pair:
        """Return both engines, at rest and without any fault."""
        given = []
        if self._prefill is None or not self._prefill.is_alive:
            given.append(("prefill", self.prefill_arguments, "0"))
        if self._decode is None or not self._decode.is_alive:
            given.append(("decode", self.decode_arguments, "1"))
        for engine in self.fleet.start(*given) if given else ():
            if engine.name == "prefill":
                self._prefill = engine
            else:
                self._decode = engine
        assert self._prefill is not None
        assert self._decode is not None
        self._prefill.call("allow_steps", None)
        self._decode.call("set_reads", PASS)
        assert_at_rest(self._prefill, self._decode)
        return self.fleet.pair(self._prefill, self._decode)


class Counts:
    """How an engine's counts of transfers have changed since this was made."""

    def __init__(self, engine: PdEngine) -> None:
        self._engine = engine
        self._before = engine.statistics()

    def __getitem__(self, key: str) -> Any:
        return self._engine.statistics()[key] - self._before[key]

    def endings(self) -> dict[str, Any]:
        """Transfers that ended, by ending, without those that did not."""
        now = self._engine.statistics()
        names = [
            f"{what}_{how}" for what in ("pulls", "sends") for how in ("done", "failed", "aborted", "lapsed")
        ]
        return {name: now[name] - self._before[name] for name in names if now[name] != self._before[name]}


def begin_transfer(pair: Pair, prompt: Sequence[int], new_tokens: int) -> str:
    """Start a request and let prefill stand still in the middle of its prompt, the first part of it read."""
    counts = Counts(pair.decode)
    layers = len(pair.decode.statistics()["share_groups"])
    pair.prefill.call("allow_steps", STEPS)
    name = pair.submit(prompt, new_tokens)
    wait_for(lambda: counts["pulled_parts"] >= STEPS * layers, "the first chunks of the prompt at decode")
    assert not pair.decode.has_answered(name)
    assert pair.decode.statistics()["pulls_open"] == 1
    assert pair.prefill.statistics()["sends_open"] == 1
    return name


def begin_held_read(pair: Pair, prompt: Sequence[int], new_tokens: int, *, after: int) -> str:
    """Start a request and let decode stand in the middle of a read, `after` reads having passed."""
    pair.decode.call("set_reads", HOLD, after)
    name = pair.submit(prompt, new_tokens)
    wait_for(lambda: pair.decode.call("held_reads") == 1, "a held read at decode")
    return name


def check_exchange(pair: Pair, prompt: Sequence[int], expected: Sequence[int]) -> None:
    """A request goes through prefill and decode as if nothing had ever happened."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    assert pair.ask([prompt], len(expected)) == [expected]
    assert_at_rest(pair.prefill, pair.decode)
    assert pulled.endings() == {"pulls_done": 1}
    assert sent.endings() == {"sends_done": 1}
