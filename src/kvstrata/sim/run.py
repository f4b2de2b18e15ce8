"""Run one seed and judge it."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from random import Random

from kvstrata.core.shares import Topology
from kvstrata.sim.decode import Decode
from kvstrata.sim.decode_rank import DecodeRank
from kvstrata.sim.faults import Faults
from kvstrata.sim.network import Network
from kvstrata.sim.options import Options, draw
from kvstrata.sim.parts import Parts
from kvstrata.sim.prefill import Prefill
from kvstrata.sim.prefill_rank import PrefillRank
from kvstrata.sim.proxy import Proxy
from kvstrata.sim.setting import Setting
from kvstrata.sim.watch import Watch
from kvstrata.sim.world import Violation, World

TRACE_EVENTS = 60
MAX_EVENTS = 200_000
_LOOK_S = 0.5

REAL = Parts(prefill=Prefill, prefill_rank=PrefillRank, decode=Decode, decode_rank=DecodeRank)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one seed."""

    seed: int
    problem: str  # empty if every invariant held
    counts: Counter[str]
    events: int
    virtual_s: float
    trace: tuple[str, ...]  # of a failed run; of every run if it was asked for

    def report(self, command: str) -> str:
        """What a person needs to understand and repeat a failure."""
        last = "\n".join(self.trace)
        return (
            f"seed {self.seed}: {self.problem}\n\noptions\n{draw(self.seed)}\n\n"
            f"last {len(self.trace)} events\n{last}\n\nrepeat with: {command}"
        )


def run_seed(
    seed: int, parts: Parts = REAL, *, trace_events: int | None = TRACE_EVENTS, keep_trace: bool = False
) -> Outcome:
    """Simulate a seed to its end, or to the first violation. Never raises for what goes wrong inside."""
    options = draw(seed)
    run = _Run(options, parts, trace_events)
    problem = ""
    try:
        run.play()
    except Exception as error:
        problem = _described(error)
    world = run.world
    return Outcome(
        seed=seed,
        problem=problem,
        counts=world.counts,
        events=world.events,
        virtual_s=world.now_s,
        trace=tuple(world.trace_lines()) if problem or keep_trace else (),
    )


class _Run:
    def __init__(self, options: Options, parts: Parts, trace_events: int | None) -> None:
        # Another stream than the one the options were drawn from, for the same seed.
        self.world = World(Random(f"world of {options.seed}"), trace_events=trace_events)
        self._options = options
        setting = Setting(
            world=self.world,
            options=options,
            network=Network(self.world, options),
            parts=parts,
            topology=Topology(options.p_tp, options.d_tp),
            watch=Watch(self.world),
        )
        self._decode = parts.decode(setting)
        self._prefill = parts.prefill(setting)
        self._proxy = Proxy(setting, self._prefill, self._decode)
        Faults(setting, self._prefill, self._decode)
        self._is_quiet = False
        self._quiet_s = 0.0

    def play(self) -> None:
        """Run until everything has ended and nothing is held; raise Violation if that takes too long."""
        self.world.at(_LOOK_S, self._look)
        self.world.run(self._limit_s())
        self._check_end()

    def _limit_s(self) -> float:
        """Within this, everything has to be over: no chain of waits is longer."""
        options = self._options
        waits_s = options.wait_s + options.open_wait_s + 2 * options.longest_lease_s + options.read_deadline_s
        # A request can wait for blocks that each of the others holds in each of its attempts.
        faults_s = options.last_fault_s + sum(fault.duration_s for fault in options.faults)
        return faults_s + 10.0 + waits_s * (2 + options.retries) * (1 + len(options.requests))

    def _bound_s(self) -> float:
        """From the last fault and answer to nothing being held any more."""
        options = self._options
        return options.longest_lease_s + max(options.open_wait_s, options.read_deadline_s) * 1.05 + 1.0

    def _look(self) -> None:
        if self.world.events > MAX_EVENTS:
            raise Violation("P6", f"{MAX_EVENTS} events and no end")
        self._check_accounts()
        last_fault_s = max(self._options.last_fault_s, self.world.last_fault_s)
        if self._proxy.is_idle and self.world.now_s > last_fault_s:
            self._quiet_s = self._quiet_s or self.world.now_s
            if self._is_idle():
                self.world.drop_events()
                return
            if self.world.now_s > self._quiet_s + self._bound_s():
                self._check_idle()
        self.world.at(_LOOK_S, self._look)

    def _is_idle(self) -> bool:
        try:
            self._check_idle()
        except Violation:
            return False
        return True

    def _check_idle(self) -> None:
        self._prefill.check_idle()
        self._decode.check_idle()

    def _check_accounts(self) -> None:
        self._prefill.check_accounts()
        self._decode.check_accounts()

    def _check_end(self) -> None:
        waiting = [client.request.number for client in self._proxy.clients if not client.ended]
        if waiting:
            raise Violation("P6", f"requests {waiting} have not ended after {self.world.now_s:.1f} s")
        self._check_idle()


def _described(error: Exception) -> str:
    if isinstance(error, Violation):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-3:]
    lines = "; ".join(f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {error} at {lines}"
