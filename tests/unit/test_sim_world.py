"""Virtual time, and processes that stop, crash and come back in it."""

from random import Random

import pytest

from kvstrata.sim.watch import Watch
from kvstrata.sim.world import Kind, Pipe, Process, Violation, World


@pytest.fixture
def world() -> World:
    return World(Random(1), trace_events=10)


def test_events_run_in_the_order_of_their_times_and_of_their_making(world: World):
    seen: list[str] = []
    for delay_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        world.at(delay_s, seen.append, name)
    assert world.run(10.0)
    assert seen == ["a", "b", "c"]
    assert world.now_s == 2.0


def test_the_run_ends_at_its_limit(world: World):
    world.at(5.0, pytest.fail)
    assert not world.run(4.0)


def test_a_stopped_process_hears_before_it_ticks_and_works_after_both(world: World):
    seen: list[str] = []
    process = Process(world, "p")
    world.at(1.0, process.stop)
    process.after(2.0, seen.append, "work")
    world.push(2.1, process, Kind.TICK, seen.append, ("tick",))
    world.at(2.2, process.hear, seen.append, "first message")
    world.at(2.3, process.hear, seen.append, "second message")
    world.at(3.0, lambda: seen.append("still stopped") if not seen else None)
    world.at(4.0, process.go_on)
    world.run(10.0)
    assert seen == ["still stopped", "first message", "second message", "tick", "work"]


def test_a_crash_ends_what_the_process_was_about_to_do(world: World):
    process = Process(world, "p")
    process.after(2.0, pytest.fail)
    process.stop()
    process.hear(pytest.fail)
    process.crash()
    process.restart()
    seen: list[str] = []
    process.after(1.0, seen.append, "new life")
    world.run(10.0)
    assert seen == ["new life"]


def test_a_pipe_keeps_its_order_across_a_stop(world: World):
    seen: list[int] = []
    process = Process(world, "p")
    pipe = Pipe(process, 0.5)
    for number in range(20):
        world.at(number * 0.1, pipe.send, seen.append, number)
    world.at(0.6, process.stop)
    world.at(1.4, process.go_on)
    world.run(10.0)
    assert seen == list(range(20))


def test_clocks_are_off_and_drift(world: World):
    process = Process(world, "p", offset_s=100.0, rate=1.01)
    world.at(10.0, lambda: None)
    world.run(20.0)
    assert process.clock() == pytest.approx(110.1)
    assert process.virtual_s(process.clock()) > world.now_s


def test_a_milestone_is_reached_once(world: World):
    seen: list[str] = []
    world.when("reads", 2, seen.append, "second read")
    for _ in range(3):
        world.count("reads")
    world.run(1.0)
    assert seen == ["second read"]


def test_a_watch_that_is_not_kept_is_a_violation(world: World):
    Watch(world).within(1.0, [Process(world, "p")], lambda: False, "the transfer")
    with pytest.raises(Violation, match="P7: the transfer is not over at 1"):
        world.run(10.0)


def test_a_watch_waits_for_a_stopped_process(world: World):
    process = Process(world, "p")
    over: list[str] = []
    process.stop()
    world.at(5.0, process.go_on)
    world.at(5.5, over.append, "over")
    Watch(world).within(1.0, [process], lambda: bool(over), "the transfer")
    assert world.run(20.0)


def test_a_watch_ends_with_a_crash(world: World):
    process = Process(world, "p")
    world.at(0.5, process.crash)
    Watch(world).within(1.0, [process], lambda: False, "the transfer")
    assert world.run(10.0)
