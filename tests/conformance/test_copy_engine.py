"""What every copy engine must do (`kvstrata.move.engine`), run against each member that needs no device."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.pages import PageView
from kvstrata.move.inline import InlineEngine
from kvstrata.move.plan import CopyPlan, plan_block_copies
from kvstrata.move.threads import ThreadEngine

LONG_S = 30.0
SHORT_S = 0.02


class Threads:
    """Real threads; a lane is blocked by a host function that waits for an event."""

    def make(self, **options: Any) -> ThreadEngine:
        return ThreadEngine(**options)

    @contextlib.contextmanager
    def blocked(self, engine: ThreadEngine, lane: str) -> Iterator[None]:
        entered, release = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            assert release.wait(LONG_S)

        engine.lane(lane).call(hold, name="blocker")
        assert entered.wait(LONG_S)
        try:
            yield
        finally:
            release.set()


class Inline:
    """The deterministic fake; a lane is blocked by holding it."""

    def make(self, **options: Any) -> InlineEngine:
        return InlineEngine(**options)

    @contextlib.contextmanager
    def blocked(self, engine: InlineEngine, lane: str) -> Iterator[None]:
        engine.lane(lane).held = True
        try:
            yield
        finally:
            engine.lane(lane).held = False


@pytest.fixture(params=[Threads, Inline], ids=["threads", "inline"])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def engine(family: Any) -> Iterator[Any]:
    engine = family.make()
    yield engine
    engine.check_integrity()
    engine.close(LONG_S)


class ForeignToken:
    """A token of another engine: nothing but the protocol."""

    name = "foreign"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[str] = []

    def done(self) -> bool:
        return False

    def wait(self, *, deadline_s: float, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error


def patterned(num_blocks: int, page_bytes: int, *, salt: int) -> torch.Tensor:
    """Bytes that say which block and which salt they are from: `[num_blocks, page_bytes]`."""
    block = torch.arange(num_blocks).unsqueeze(1)
    place = torch.arange(page_bytes).unsqueeze(0)
    return ((block * 131 + place * 7 + salt * 53) % 251).to(torch.uint8)


def fail_with(error: BaseException) -> Callable[[], None]:
    def fn() -> None:
        raise error

    return fn


def nothing() -> None:
    pass


@pytest.mark.parametrize("gap", [0, 64], ids=["compact", "gaps"])
def test_only_the_named_blocks_change(engine: Any, gap: int) -> None:
    page = 192
    source = patterned(9, page + gap, salt=1)
    target = patterned(9, page, salt=2)
    before = target.clone()
    plan = plan_block_copies(
        PageView.of_tensor(target), PageView.of_tensor(source[:, :page]), np.array([7, 0, 3, 4])
    )
    engine.lane("load").submit(plan, name="blocks").wait(deadline_s=LONG_S, what="test")
    moved = [0, 3, 4, 7]
    kept = [1, 2, 5, 6, 8]
    assert torch.equal(target[moved], source[moved, :page])
    assert torch.equal(target[kept], before[kept])


def test_addresses_beyond_4_gib(engine: Any) -> None:
    page, num_blocks = 4096, (5 << 30) // 4096
    allocator = SharedMemoryAllocator(available_bytes=lambda: 1 << 40, huge_pages=False)
    source, target = allocator.alloc(5 << 30, "source"), allocator.alloc(5 << 30, "target")
    block_ids = np.array([0, 3, (1 << 32) // page + 3, num_blocks - 1], dtype=np.int32)
    pages = source.tensor().view(num_blocks, page)
    for salt, block in enumerate(block_ids):
        pages[int(block)] = patterned(1, page, salt=salt + 1)[0]
    views = [
        PageView(address=r.address, block_stride_bytes=page, page_bytes=page, num_blocks=num_blocks)
        for r in (target, source)
    ]
    plan = plan_block_copies(*views, block_ids[1:])
    engine.lane("load").submit(plan, name="far").wait(deadline_s=LONG_S, what="test")
    arrived = target.tensor().view(num_blocks, page)
    for block in block_ids[1:]:
        assert torch.equal(arrived[int(block)], pages[int(block)])
    # Where 32-bit arithmetic would put the last block, and a block nobody asked for.
    assert not arrived[((num_blocks - 1) * page & 0xFFFFFFFF) // page].any()
    assert not arrived[0].any()


def test_an_empty_plan_is_done_at_once_when_waited_for(engine: Any) -> None:
    token = engine.lane("load").submit(CopyPlan.empty(), name="no blocks")
    token.wait(deadline_s=LONG_S, what="test")
    assert token.done()


def test_a_lane_keeps_the_order_of_submission(engine: Any) -> None:
    a, b, c = patterned(1, 64, salt=1), patterned(1, 64, salt=2), patterned(1, 64, salt=3)
    block = np.array([0])
    lane = engine.lane("save")
    seen: list[torch.Tensor] = []
    lane.submit(plan_block_copies(PageView.of_tensor(b), PageView.of_tensor(a), block), name="a to b")
    lane.call(lambda: seen.append(b.clone()), name="look at b")
    lane.submit(plan_block_copies(PageView.of_tensor(b), PageView.of_tensor(c), block), name="c to b")
    lane.drain(deadline_s=LONG_S)
    assert torch.equal(seen[0], a)
    assert torch.equal(b, c)


def test_an_operation_runs_after_tokens_of_other_lanes(family: Any, engine: Any) -> None:
    order: list[str] = []
    with family.blocked(engine, "save"):
        saved = engine.lane("save").call(lambda: order.append("save"), name="save layer 1")
        loaded = engine.lane("load").call(lambda: order.append("load"), after=[saved], name="load layer 3")
        behind = engine.lane("load").call(lambda: order.append("behind"), name="load layer 4")
        with pytest.raises(DeadlineExceeded):
            loaded.wait(deadline_s=SHORT_S, what="test")
        assert order == []
        assert not loaded.done()
    behind.wait(deadline_s=LONG_S, what="test")
    assert order == ["save", "load", "behind"]
    assert loaded.done()


def test_lanes_do_not_wait_for_each_other(family: Any, engine: Any) -> None:
    with family.blocked(engine, "save"):
        token = engine.lane("load").call(nothing, name="load")
        token.wait(deadline_s=LONG_S, what="test")
        assert token.done()


def test_a_token_is_not_done_before_its_bytes_are_there(family: Any, engine: Any) -> None:
    source, target = patterned(1, 64, salt=1), patterned(1, 64, salt=2)
    plan = plan_block_copies(PageView.of_tensor(target), PageView.of_tensor(source), np.array([0]))
    with family.blocked(engine, "load"):
        token = engine.lane("load").submit(plan, name="load layer 0")
        assert not token.done()
        assert not torch.equal(target, source)
    token.wait(deadline_s=LONG_S, what="test")
    assert token.done()
    assert torch.equal(target, source)


def test_a_wait_past_its_deadline_says_what_for(family: Any, engine: Any) -> None:
    with family.blocked(engine, "load"):
        token = engine.lane("load").call(nothing, name="load layer 7")
        with pytest.raises(DeadlineExceeded, match="prefix of request 12") as caught:
            token.wait(deadline_s=SHORT_S, what="prefix of request 12")
    assert "load layer 7" in str(caught.value)
    token.wait(deadline_s=LONG_S, what="prefix of request 12")


def test_a_failed_call_fails_its_token_and_nothing_else(engine: Any) -> None:
    error = OSError("disk full")
    lane = engine.lane("save")
    failed = lane.call(fail_with(error), name="store layer 2")
    fine = lane.call(nothing, name="store layer 3")
    with pytest.raises(TransferFailed, match=r"step 9.*store layer 2.*disk full") as caught:
        failed.wait(deadline_s=LONG_S, what="step 9")
    assert caught.value.__cause__ is error
    fine.wait(deadline_s=LONG_S, what="step 9")


def test_polling_a_failed_token_raises(engine: Any) -> None:
    token = engine.lane("save").call(fail_with(OSError("disk full")), name="store layer 2")
    with pytest.raises(TransferFailed):
        token.wait(deadline_s=LONG_S, what="test")
    with pytest.raises(TransferFailed, match="disk full"):
        token.done()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_even_an_exit_only_fails_its_token(engine: Any, error: BaseException) -> None:
    token = engine.lane("save").call(fail_with(error), name="store layer 2")
    with pytest.raises(TransferFailed) as caught:
        token.wait(deadline_s=LONG_S, what="test")
    assert caught.value.__cause__ is error
    engine.lane("save").call(nothing, name="next").wait(deadline_s=LONG_S, what="test")


def test_a_failed_copy_fails_its_token(family: Any) -> None:
    source, target = patterned(1, 64, salt=1), patterned(1, 64, salt=2)
    plan = plan_block_copies(PageView.of_tensor(target), PageView.of_tensor(source), np.array([0]))

    def refuse(plan: CopyPlan) -> None:
        raise RuntimeError("bus error")

    engine = family.make(copy=refuse)
    token = engine.lane("load").submit(plan, name="load layer 5")
    with pytest.raises(TransferFailed, match=r"load layer 5.*bus error"):
        token.wait(deadline_s=LONG_S, what="test")
    counts = engine.statistics().lanes["load"]
    assert (counts.copies, counts.copied_bytes, counts.failures) == (0, 0, 1)
    engine.close(LONG_S)


def test_a_failure_reaches_all_that_come_after_it_and_names_the_root(engine: Any) -> None:
    ran: list[str] = []
    root = engine.lane("save").call(fail_with(OSError("disk full")), name="store layer 2")
    second = engine.lane("load").call(lambda: ran.append("second"), after=[root], name="load layer 4")
    third = engine.lane("save").call(lambda: ran.append("third"), after=[second], name="store layer 4")
    unrelated = engine.lane("load").call(lambda: ran.append("unrelated"), name="load layer 5")
    with pytest.raises(TransferFailed, match=r"store layer 4.*store layer 2.*disk full"):
        third.wait(deadline_s=LONG_S, what="test")
    unrelated.wait(deadline_s=LONG_S, what="test")
    assert ran == ["unrelated"]
    lanes = engine.statistics().lanes
    assert (lanes["save"].failures, lanes["save"].skipped) == (1, 1)
    assert (lanes["load"].failures, lanes["load"].skipped) == (0, 1)
    # Whoever waited for the third operation was told the root cause: it is not a silent failure any more.
    assert engine.statistics().unreported == 0


def test_tokens_of_other_engines_are_waited_for(engine: Any) -> None:
    foreign = ForeignToken()
    engine.lane("load").call(nothing, after=[foreign], name="load layer 1").wait(
        deadline_s=LONG_S, what="test"
    )
    assert len(foreign.asked) == 1
    assert "load layer 1" in foreign.asked[0]


def test_failure_of_another_engine_is_passed_on(engine: Any) -> None:
    ran: list[str] = []
    foreign = ForeignToken(TransferFailed("peer lost"))
    token = engine.lane("load").call(lambda: ran.append("x"), after=[foreign], name="load layer 1")
    with pytest.raises(TransferFailed, match=r"load layer 1.*peer lost"):
        token.wait(deadline_s=LONG_S, what="test")
    assert ran == []


def test_an_error_of_another_kind_from_another_engine_does_not_end_the_lane(engine: Any) -> None:
    token = engine.lane("load").call(nothing, after=[ForeignToken(KeyError("x"))], name="load layer 1")
    with pytest.raises(TransferFailed, match="KeyError"):
        token.wait(deadline_s=LONG_S, what="test")
    engine.lane("load").call(nothing, name="next").wait(deadline_s=LONG_S, what="test")


def test_drain_waits_for_everything_submitted(engine: Any) -> None:
    ran: list[int] = []
    lane = engine.lane("save")
    for i in range(50):
        lane.call(lambda i=i: ran.append(i), name=f"call {i}")
    lane.drain(deadline_s=LONG_S)
    assert ran == list(range(50))
    assert engine.statistics().lanes["save"].pending == 0


def test_drain_of_an_unused_lane_returns(engine: Any) -> None:
    engine.lane("never used").drain(deadline_s=LONG_S)


def test_drain_past_its_deadline_names_lane_and_operation(family: Any, engine: Any) -> None:
    with family.blocked(engine, "save"):
        engine.lane("save").call(nothing, name="blocker")
        with pytest.raises(DeadlineExceeded, match=r"save.*blocker"):
            engine.lane("save").drain(deadline_s=SHORT_S)


def test_drain_tells_of_each_failure_nobody_asked_about_once(engine: Any) -> None:
    lane = engine.lane("save")
    lane.call(fail_with(OSError("first")), name="a")
    lane.call(fail_with(OSError("second")), name="b")
    with pytest.raises(TransferFailed, match="first"):
        lane.drain(deadline_s=LONG_S)
    lane.drain(deadline_s=LONG_S)
    assert engine.statistics().unreported == 0
    assert engine.statistics().failures == 2


def test_drain_is_silent_about_failures_already_told(engine: Any) -> None:
    token = engine.lane("save").call(fail_with(OSError("first")), name="a")
    with pytest.raises(TransferFailed):
        token.wait(deadline_s=LONG_S, what="test")
    engine.lane("save").drain(deadline_s=LONG_S)


def test_failures_nobody_asked_about_are_counted_and_logged(
    family: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = family.make()
    engine.lane("save").call(fail_with(OSError("disk full")), name="store layer 2")
    engine.close(LONG_S)
    assert engine.statistics().unreported == 1
    assert any("store layer 2" in m and "disk full" in m for m in caplog.messages)


def test_statistics_add_up(engine: Any) -> None:
    source, target = patterned(4, 64, salt=1), patterned(4, 64, salt=2)
    plan = plan_block_copies(PageView.of_tensor(target), PageView.of_tensor(source), np.array([0, 2, 3]))
    lane = engine.lane("load")
    lane.submit(plan, name="copy")
    lane.submit(CopyPlan.empty(), name="empty copy")
    bad = lane.call(fail_with(OSError("x")), name="bad call")
    lane.call(nothing, after=[bad], name="skipped call")
    lane.call(nothing, name="call")
    with pytest.raises(TransferFailed):
        lane.drain(deadline_s=LONG_S)
    counts = engine.statistics().lanes["load"]
    assert (counts.submitted, counts.pending) == (5, 0)
    assert (counts.copies, counts.calls, counts.failures, counts.skipped) == (2, 1, 1, 1)
    assert counts.copied_bytes == engine.statistics().copied_bytes == 3 * 64


def test_a_pending_operation_is_counted(family: Any, engine: Any) -> None:
    before = engine.statistics().lanes.get("save")
    assert before is None
    with family.blocked(engine, "save"):
        already = engine.statistics().lanes["save"].pending
        engine.lane("save").call(nothing, name="waiting")
        assert engine.statistics().lanes["save"].pending == already + 1


def test_lanes_are_made_once(engine: Any) -> None:
    assert engine.lane("load") is engine.lane("load")
    assert engine.lane("load") is not engine.lane("save")
    assert engine.lane("load").name == "load"


def test_compute_is_done_where_computing_blocks_its_caller(engine: Any) -> None:
    token = engine.compute_done()
    assert token.done()
    token.wait(deadline_s=0.0, what="test")
    engine.lane("save").call(nothing, after=[token], name="save").wait(deadline_s=LONG_S, what="test")


def test_finished_work_is_let_go(engine: Any) -> None:
    """A closure may hold a layer's tensors: an idle lane must not keep the last one alive."""

    class Work:
        def __call__(self) -> None:
            pass

    gone = threading.Event()
    work = Work()
    weakref.finalize(work, gone.set)
    token = engine.lane("save").call(work, name="store")
    del work
    token.wait(deadline_s=LONG_S, what="test")
    assert gone.wait(LONG_S)


def test_close_finishes_what_is_pending_and_refuses_the_rest(family: Any) -> None:
    engine = family.make()
    ran: list[int] = []
    lane = engine.lane("save")
    tokens = [lane.call(lambda i=i: ran.append(i), name=f"call {i}") for i in range(20)]
    engine.close(LONG_S)
    assert ran == list(range(20))
    assert all(token.done() for token in tokens)
    with pytest.raises(TransferFailed, match="closed"):
        lane.call(nothing, name="late")
    with pytest.raises(TransferFailed, match="closed"):
        engine.lane("another")
    engine.close(LONG_S)
    engine.check_integrity()


def test_close_past_its_deadline_fails_what_has_not_begun(family: Any) -> None:
    engine = family.make()
    ran: list[str] = []
    with family.blocked(engine, "save"):
        engine.lane("save").call(lambda: ran.append("blocker"), name="blocker")
        late = engine.lane("save").call(lambda: ran.append("late"), name="store layer 3")
        other = engine.lane("load").call(lambda: ran.append("after"), after=[late], name="load layer 5")
        with pytest.raises(DeadlineExceeded, match=r"must not be freed.*blocker"):
            engine.close(SHORT_S)
        for token in (late, other):
            with pytest.raises(TransferFailed, match="closed"):
                token.wait(deadline_s=LONG_S, what="test")
    engine.close(LONG_S)
    assert ran == []
    engine.check_integrity()
    assert all(lane.pending == 0 for lane in engine.statistics().lanes.values())
