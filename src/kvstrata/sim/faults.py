"""Carries out a seed's faults, and checks that what a crash leaves behind is gone within the lease (P7)."""

from __future__ import annotations

from kvstrata.sim.decode import Decode
from kvstrata.sim.decode_rank import DecodeRank
from kvstrata.sim.options import Fault
from kvstrata.sim.prefill import Prefill
from kvstrata.sim.prefill_rank import PrefillRank
from kvstrata.sim.setting import PAGE_BYTES, Setting
from kvstrata.sim.world import Process

OTHER_PAGE_BYTES = 2 * PAGE_BYTES


class Faults:
    """Schedules every fault when it is made."""

    def __init__(self, setting: Setting, prefill: Prefill, decode: Decode) -> None:
        self._setting = setting
        self._world = setting.world
        self._prefill = prefill
        self._decode = decode
        self._stops: dict[str, int] = {}
        carry_out = {"crash": self._crash, "relayout": self._relayout, "stop": self._stop, "cut": self._cut}
        for fault in setting.options.faults:
            if fault.milestone:
                self._world.when(fault.milestone, fault.at_count, carry_out[fault.kind], fault)
            else:
                self._world.at(fault.at_s, carry_out[fault.kind], fault)

    def _crash(self, fault: Fault) -> None:
        engine = self._prefill if fault.target == "p" else self._decode
        if not engine.process.is_up:
            return
        self._begin(fault)
        self._kill(engine)
        if fault.duration_s:
            self._world.at(fault.duration_s, engine.restart)

    def _relayout(self, fault: Fault) -> None:
        if self._prefill.process.is_up:
            self._begin(fault)
            self._kill(self._prefill)
            self._world.at(fault.duration_s, self._prefill.restart, OTHER_PAGE_BYTES)

    def _kill(self, engine: Prefill | Decode) -> None:
        engine.crash()
        for process in engine.processes:
            self._stops[process.name] = 0
        within_s = self._setting.options.longest_lease_s
        if engine is self._decode:
            for rank in self._prefill.ranks:
                for transfer, outgoing in rank.unsettled.items():
                    if outgoing.is_accepted:
                        self._watch_rank(rank, transfer, within_s)
        else:
            within_s += self._setting.options.read_deadline_s
            for reader in self._decode.ranks:
                for transfer in reader.fully_opened():
                    self._watch_reader(reader, transfer, within_s)

    # After a stop the lease begins anew: with what lies in the socket, which may be old.

    def _watch_rank(self, rank: PrefillRank, transfer: str, within_s: float) -> None:
        what = f"{transfer} on {rank.name} after decode crashed"
        self._setting.watch.within(
            within_s, [rank.process], lambda: transfer not in rank.unsettled, what, grace_s=within_s
        )

    def _watch_reader(self, rank: DecodeRank, transfer: str, within_s: float) -> None:
        what = f"{transfer} on {rank.name} after prefill crashed"
        self._setting.watch.within(
            within_s, [rank.process], lambda: transfer not in rank.expected, what, grace_s=within_s
        )

    def _stop(self, fault: Fault) -> None:
        processes = [
            process
            for engine in (self._prefill, self._decode)
            for process in engine.processes
            if process.name == fault.target or engine.name == fault.target
        ]
        if not processes[0].is_up:
            return
        self._begin(fault)
        for process in processes:
            self._stops[process.name] = self._stops.get(process.name, 0) + 1
            process.stop()
            self._world.at(fault.duration_s, self._go_on, process, process.life)

    def _go_on(self, process: Process, life: int) -> None:
        if process.life != life:
            return
        self._stops[process.name] -= 1
        if self._stops[process.name] == 0:
            self._world.note(process.name, "goes on")
            process.go_on()

    def _cut(self, fault: Fault) -> None:
        rank = self._prefill.ranks[int(fault.target[1:])]
        self._begin(fault)
        self._setting.network.cut(rank.name, rank.peer)
        self._world.at(fault.duration_s, self._setting.network.mend, rank.name, rank.peer)

    def _begin(self, fault: Fault) -> None:
        self._world.counts[f"fault {fault.kind}"] += 1
        self._world.last_fault_s = max(self._world.last_fault_s, self._world.now_s + fault.duration_s)
        self._world.note("fault", fault.kind, fault.target, f"for {fault.duration_s:.3f} s")
