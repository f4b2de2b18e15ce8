"""M4, M1, R1-R5: whatever requests come, attention reads each selected row as it is now, once, and no other.

The machine drives one rank, or two that share a host pool, as an engine does: chunked prompts, decode, drafts
that are rejected, prefixes shared with running requests, with finished ones and with one of the same step,
blocks reused at once or filled by a store, forwards that break off, copies that fail or hang. The same
machine must fail where a part of the data path is broken on purpose, else it could not have found anything.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sparse_broken import BROKEN
from sparse_engine import FAULTS, Engine

from kvstrata.errors import DeadlineExceeded
from kvstrata.move.forward_rows import WindowLimits
from kvstrata.move.sparse_testing import Home, Span
from kvstrata.move.testing import Request

BLOCKS = 12
MOST_REQUESTS = 4
LOOKAHEAD = 3  # rows that drafts may write beyond the confirmed ones

Scheduled = list[tuple[Request, int]]


class SparseMachine(RuleBasedStateMachine):
    parts: ClassVar[Mapping[str, Any]] = {}

    @initialize(
        layers=st.integers(2, 4),
        drafts=st.sampled_from([1, 0, 2]),
        leaders=st.sets(st.integers(1, 3)),
        tokens=st.sampled_from([3, 1, 4]),
        topk=st.integers(1, 5),
        spare=st.sampled_from([2, 0, 9, 30]),
        window=st.integers(1, 3),
        ranks=st.sampled_from([1, 2]),
        policy=st.sampled_from(["lru", "frequency"]),
        seed=st.integers(0, 1 << 30),
    )
    def start(
        self,
        layers: int,
        drafts: int,
        leaders: set[int],
        tokens: int,
        topk: int,
        spare: int,
        window: int,
        ranks: int,
        policy: str,
        seed: int,
    ) -> None:
        self.tokens = tokens
        home = Home(layers=layers, drafts=drafts, leaders=[0, *leaders], blocks=BLOCKS, block_tokens=tokens)
        limits = WindowLimits(
            block_tokens=tokens,
            window_blocks=window,
            capacity=topk + spare,
            topk=topk,
            decode_tokens=1 + LOOKAHEAD,
        )
        self.engine = Engine(home, limits, ranks=ranks, seed=seed, policy=policy, **self.parts)
        self.requests: list[Request] = []
        self.retired: list[tuple[int, ...]] = []  # full blocks of finished requests, not reused yet
        self.holders = [0] * BLOCKS
        self.serial = 0
        self._new_request(())

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    @rule()
    def add_request(self) -> None:
        self._new_request(())

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS and (self.requests or self.retired))
    @rule(data=st.data())
    def add_request_with_prefix_hit(self, data: st.DataObject) -> None:
        full = [tuple(r.blocks[: r.computed // self.tokens]) for r in self.requests] + self.retired
        found = data.draw(st.sampled_from(full))
        self._new_request(found[: data.draw(st.integers(0, len(found)))])

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            self._run(data, self._schedule(data, self._choose(data)))

    @precondition(lambda self: len(self.requests) < MOST_REQUESTS and 0 in self.holders)
    @rule(data=st.data())
    def step_with_blocks_from_a_store(self, data: st.DataObject) -> None:
        request = self._new_request(())
        for _ in range(data.draw(st.integers(1, min(3, self.holders.count(0))))):
            self._take_block(data, request)
        brought = list(request.blocks)
        request.computed = len(brought) * self.tokens
        scheduled = self._schedule(data, [request, *self._choose(data)])
        if any(it is request for it, _ in scheduled):
            self._run(data, scheduled, brought)
        else:
            self._free(request)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), fault=st.sampled_from(FAULTS))
    def step_that_breaks_off(self, data: st.DataObject, fault: str) -> None:
        """An exception in the forward; vLLM ends the step or, with drafts to come, does not."""
        engine, last_serial = self.engine, self.serial
        shared = len(engine.ranks) > 1
        if shared and fault.startswith("held"):
            return  # a rank that cannot end its step ends the others
        scheduled = self._schedule(data, self._choose(data))
        if not scheduled:
            return
        layer = data.draw(st.sampled_from(engine.home.targets))
        engine.begin(lost_layer=layer if fault == "arrival" else None)
        broken = engine.break_at(fault, layer, self._spans(scheduled))
        if engine.hangs():
            pipeline = engine.ranks[0].pipeline
            for end in (pipeline.end_step, pipeline.begin_step):
                with contextlib.suppress(DeadlineExceeded):
                    end()
                    raise AssertionError("M3: a step ended beside a copy")
        engine.heal()
        if broken:
            for request in self.requests:
                if request.serial > last_serial:  # a twin: its prefix was never computed
                    self._free(request)
        else:
            self._advance(data, scheduled)
        if shared or data.draw(st.booleans()):
            engine.end(whole=False)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.retired.append(tuple(request.blocks[: request.computed // self.tokens]))
        self._free(request)

    @rule()
    def step_without_tokens(self) -> None:
        self.engine.begin()
        self.engine.end()

    @invariant()
    def is_sound(self) -> None:
        for rank in self.engine.ranks if hasattr(self, "engine") else ():
            rank.pipeline.check_integrity()
            rank.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()

    def _run(self, data: st.DataObject, scheduled: Scheduled, brought: list[int] | None = None) -> None:
        if not scheduled:
            return
        engine, home = self.engine, self.engine.home
        engine.begin(brought or [])
        spans = self._spans(scheduled)
        for layer in home.targets:
            engine.layer(layer, spans)
        for at in range(data.draw(st.integers(0, LOOKAHEAD)) if home.drafts else 0):
            if at:  # the first pass computes what the target did, later ones one row ahead each
                ahead = [(r, r.computed + new + at) for r, new in scheduled]
                spans = [Span(blocks=r.blocks, begin=end - 1, end=end) for r, end in ahead]
            for layer in home.drafts if data.draw(st.booleans()) else home.drafts[:1]:
                engine.layer(layer, spans)
        engine.end()
        self._advance(data, scheduled)

    def _spans(self, scheduled: Scheduled) -> list[Span]:
        spans = [Span(blocks=r.blocks, begin=r.computed, end=r.computed + new) for r, new in scheduled]
        spans.insert(self.engine.rng.randint(0, len(spans)), Span(blocks=(), begin=0, end=0))
        return spans

    def _advance(self, data: st.DataObject, scheduled: Scheduled) -> None:
        """Confirm the new rows; of few behind a context some may be rejected drafts, written again later."""
        for request, new in scheduled:
            few = request.computed > 0 and new <= 1 + LOOKAHEAD
            request.computed += data.draw(st.integers(1, new)) if few else new

    # Requests and blocks, as vLLM's scheduler hands them out.

    def _new_request(self, prefix: tuple[int, ...]) -> Request:
        self.serial += 1
        for block in prefix:
            self.holders[block] += 1
        computed = len(prefix) * self.tokens
        self.requests.append(Request(serial=self.serial, blocks=list(prefix), computed=computed))
        return self.requests[-1]

    def _choose(self, data: st.DataObject) -> list[Request]:
        return data.draw(st.lists(st.sampled_from(self.requests), unique_by=id, min_size=1))

    def _schedule(self, data: st.DataObject, chosen: list[Request]) -> Scheduled:
        """Give chunks and blocks, room for drafts included, preempting others where needed."""
        scheduled: Scheduled = []
        for request in chosen:
            if any(request is other for other, _ in scheduled):
                continue
            new = data.draw(st.one_of(st.just(1), st.integers(1, 9)))
            needed = -(-(request.computed + new + LOOKAHEAD) // self.tokens) - len(request.blocks)
            while needed > (free := self.holders.count(0)):
                busy = {id(r) for r, _ in scheduled} | {id(request)}
                victims = [r for r in self.requests if r.blocks and id(r) not in busy]
                if not victims:
                    break
                self._free(data.draw(st.sampled_from(victims)))
            if needed > free:
                continue
            for _ in range(max(0, needed)):
                self._take_block(data, request)
            scheduled.append((request, new))
            if len(self.requests) < MOST_REQUESTS and data.draw(st.integers(0, 3)) == 0:
                # A twin in the same step: its prefix is being computed by this very forward.
                full = (request.computed + new) // self.tokens
                chosen.append(self._new_request(tuple(request.blocks[:full])))
        return scheduled

    def _take_block(self, data: st.DataObject, request: Request) -> None:
        block = data.draw(st.sampled_from([at for at, n in enumerate(self.holders) if n == 0]))
        self.holders[block] = 1
        self.retired = [prefix for prefix in self.retired if block not in prefix]
        request.blocks.append(block)

    def _free(self, request: Request) -> None:
        for block in request.blocks:
            self.holders[block] -= 1
        request.blocks, request.computed = [], 0


SETTINGS = functools.partial(
    hypothesis.settings,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def test_M4_attention_reads_what_plain_vllm_would():  # noqa: N802
    run_state_machine_as_test(SparseMachine, settings=SETTINGS(max_examples=80, stateful_step_count=16))


@pytest.mark.parametrize("parts", BROKEN, ids=lambda parts: next(iter(parts.values())).__name__)
def test_the_machine_finds_a_broken_data_path(parts: dict[str, Any]):
    machine = type("Broken", (SparseMachine,), {"parts": parts})
    with pytest.raises(AssertionError, match=r"M3|M4|R2|R4"):
        run_state_machine_as_test(
            machine,
            settings=SETTINGS(
                max_examples=300,
                stateful_step_count=14,
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                phases=[hypothesis.Phase.generate],
            ),
        )
