"""How the launcher keeps processes and what it shows of them, on fake processes and a fake clock."""

import signal
from pathlib import Path

import pytest
from rich.console import Console

from kvstrata.serve_pd.plan import Launch
from kvstrata.serve_pd.status import shown, table
from kvstrata.serve_pd.supervisor import State, Supervisor


def launch(name: str) -> Launch:
    return Launch(
        name=name,
        role=name.partition("-")[0],
        url="http://127.0.0.1:1",
        argv=(),
        environment={},
        log=Path("nowhere/x.log"),
    )


class FakeProcess:
    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[signal.Signals] = []
        self.is_stubborn = False

    def status(self) -> int | None:
        return self.code

    def end(self, how: signal.Signals) -> None:
        self.signals.append(how)
        if self.code is None and (how is signal.SIGKILL or not self.is_stubborn):
            self.code = -how

    def is_gone(self) -> bool:
        return self.code is not None


class World:
    def __init__(self, *names: str, restarts: int = 1) -> None:
        self.now_s = 0.0
        self.up: set[str] = set()
        self.processes: dict[str, list[FakeProcess]] = {name: [] for name in names}
        self.order: list[str] = []
        self.supervisor = Supervisor(
            [launch(name) for name in names],
            start=self.start,
            is_up=lambda launch: launch.name in self.up,
            clock=lambda: self.now_s,
            start_deadline_s=100.0,
            restarts=restarts,
        )
        self.supervisor.start()

    def start(self, launch: Launch) -> FakeProcess:
        self.processes[launch.name].append(FakeProcess())
        return self.processes[launch.name][-1]

    def step(self, seconds: float = 0.0) -> list[State]:
        self.now_s += seconds
        self.supervisor.step()
        return [child.state for child in self.supervisor.statistics()]

    def stop(self, *, patience_s: float = 100.0) -> bool:
        impatient_s = self.now_s + patience_s

        def wait(seconds: float) -> bool:
            self.now_s += seconds
            return self.now_s < impatient_s

        return self.supervisor.stop(deadline_s=5, wait=wait)


def test_processes_become_ready_one_by_one():
    world = World("prefill-0", "proxy")
    assert world.step() == [State.STARTING, State.STARTING]
    world.up = {"prefill-0"}
    assert world.step() == [State.READY, State.STARTING]
    assert not world.supervisor.is_ready
    world.up = {"prefill-0", "proxy"}
    assert world.step() == [State.READY, State.READY]
    assert world.supervisor.is_ready


def test_a_process_that_ends_is_started_again_after_a_pause_then_it_fails():
    world = World("decode-0")
    world.up = {"decode-0"}
    world.step()
    world.processes["decode-0"][0].code = 1
    assert world.step() == [State.PAUSED]
    assert world.processes["decode-0"][0].signals == [signal.SIGKILL]  # its workers may still be there
    assert world.step(0.5) == [State.PAUSED]
    world.up = set()
    assert world.step(0.6) == [State.STARTING]
    world.processes["decode-0"][1].code = -9
    assert world.step() == [State.FAILED]
    failed = world.supervisor.failed
    assert failed is not None
    assert (failed.why, failed.restarts) == ("was ended by SIGKILL", 1)


def test_what_has_never_been_ready_is_not_started_again():
    world = World("decode-0")
    world.processes["decode-0"][0].code = 2
    assert world.step() == [State.FAILED]
    assert world.supervisor.failed is not None
    assert world.supervisor.failed.why == "ended with status 2"


def test_what_is_not_ready_in_time_has_failed():
    world = World("decode-0")
    assert world.step(99) == [State.STARTING]
    assert world.step(1) == [State.FAILED]
    assert world.supervisor.failed is not None
    assert world.supervisor.failed.why == "start: not ready within 100 s"


def test_the_end_is_asked_for_then_forced():
    world = World("prefill-0", "decode-0", "proxy")
    world.processes["decode-0"][0].is_stubborn = True
    assert not world.stop()
    assert world.processes["prefill-0"][0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert world.processes["decode-0"][0].code == -signal.SIGKILL
    assert {child.state for child in world.supervisor.statistics()} == {State.ENDED}


def test_an_impatient_end_is_forced_at_once():
    world = World("decode-0")
    world.processes["decode-0"][0].is_stubborn = True
    assert not world.stop(patience_s=1)
    assert world.processes["decode-0"][0].code == -signal.SIGKILL
    assert world.now_s < 2


def test_an_end_in_time_is_said():
    assert World("prefill-0", "proxy").stop()


def test_a_move_that_is_not_in_the_table_is_a_defect():
    world = World("proxy")
    with pytest.raises(AssertionError, match="proxy: start in starting"):
        world.supervisor.start()


def test_states_are_printed_once_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    world = World("prefill-0", "proxy")
    with shown(Console(width=200)) as show:
        for _ in range(3):
            world.step()
            show(world.supervisor.statistics())
        world.up = {"prefill-0"}
        world.step()
        show(world.supervisor.statistics())
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "prefill-0: starting http://127.0.0.1:1, log nowhere/x.log",
        "proxy: starting http://127.0.0.1:1, log nowhere/x.log",
        "prefill-0: ready",
    ]


def test_the_table_has_a_row_a_process():
    world = World("prefill-0", "proxy")
    console = Console(width=120, record=True)
    console.print(table(world.supervisor.statistics()))
    text = console.export_text()
    assert "prefill-0" in text
    assert "nowhere/x.log" in text
