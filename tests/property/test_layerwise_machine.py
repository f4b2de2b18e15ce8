"""M4, M1: whatever requests, plans and drafts come, attention reads what a plain full cache would hold.

The machine drives the pipeline as an engine does: chunked prefill, decode, prefixes shared with running and
with finished requests, blocks reused, preemption, drafts, forwards that break off. Windows that layers share
are poisoned between steps, blocks when they change owner. The same machine must fail where a part of the data
path is broken on purpose, else it could not have found anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

from kvstrata.core.gate import Obligation, SlotGate
from kvstrata.move.carrier import LOAD_LANE, SAVE_LANE
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.faulty import DroppingEngine
from kvstrata.move.inline import InlineEngine
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.move.step import StepBlocks
from kvstrata.move.testing import Batch, Forward, Memory, Request, make_pipeline, make_plan
from kvstrata.move.threads import ThreadEngine

BLOCKS = 14
MOST_REQUESTS = 4
LOOKAHEAD = 3  # rows that drafts may write beyond the confirmed ones


class LayerwiseMachine(RuleBasedStateMachine):
    engine_class: ClassVar[Callable[[], CopyEngine]] = InlineEngine
    dropped_lanes: ClassVar[frozenset[str]] = frozenset()
    gate_class: ClassVar[type[SlotGate]] = SlotGate
    pipeline_class: ClassVar[type[LayerwisePipeline]] = LayerwisePipeline

    @initialize(
        layers=st.integers(3, 6),
        drafts=st.sampled_from([1, 2, 0]),
        indexers=st.sets(st.integers(0, 7)),
        shared=st.sampled_from([1, 2, 3, None]),
        independent=st.sampled_from([(0,), (), (0, -1), (1,)]),
        tokens=st.sampled_from([3, 4, 1]),
        gap_bytes=st.sampled_from([0, 0, 8]),
        prefetch=st.sampled_from([2, 0, 1, 4]),
    )
    def start(
        self,
        layers: int,
        drafts: int,
        indexers: set[int],
        shared: int | None,
        independent: tuple[int, ...],
        tokens: int,
        gap_bytes: int,
        prefetch: int,
    ) -> None:
        plan = make_plan(
            layers=layers,
            drafts=drafts,
            indexers=sorted(indexers),
            shared=shared,
            independent=independent,
            tokens=tokens,
        )
        self.tokens = tokens
        self.memory = Memory(plan, blocks=BLOCKS, tokens=tokens, gap_bytes=gap_bytes)
        self.inner_engine = type(self).engine_class()
        engine: CopyEngine = self.inner_engine
        if self.dropped_lanes:
            engine = DroppingEngine(engine, lanes=self.dropped_lanes)
        self.pipeline = make_pipeline(
            self.memory,
            engine,
            prefetch_layers=prefetch,
            gate_class=self.gate_class,
            pipeline_class=self.pipeline_class,
        )
        self.forward = Forward(self.memory, self.pipeline)
        self.targets = [b.index for b in plan.bundles if not b.is_draft]
        self.draft_layers = [b.index for b in plan.bundles if b.is_draft]
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
            self._step(data)

    def _step(self, data: st.DataObject) -> None:
        scheduled = self._schedule(data)
        if not scheduled:
            return
        target = Batch.of([(r, r.computed, r.computed + new) for r, new in scheduled])
        acquires = data.draw(st.integers(1, 2))
        self.pipeline.begin_step()
        for layer in self.targets:
            self.forward.layer(layer, target, acquires=acquires)
        passes = data.draw(st.integers(0, LOOKAHEAD)) if self.draft_layers else 0
        for at in range(passes):
            # The first pass rewrites what the target saw, later ones go one row ahead each.
            ahead = [(r, r.computed + new + at - 1, r.computed + new + at) for r, new in scheduled]
            batch = Batch.of(ahead) if at else target
            for layer in self.draft_layers if data.draw(st.booleans()) else self.draft_layers[:1]:
                self.forward.layer(layer, batch, acquires=acquires)
        self.pipeline.end_step()
        for request, new in scheduled:
            request.computed += new
            self.memory.forget_rows(request)
        self.memory.poison_shared_windows()

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def step_that_breaks_off(self, data: st.DataObject) -> None:
        """An exception in the forward; vLLM ends the step or, with drafts to come, does not."""
        last_serial = self.serial
        scheduled = self._schedule(data)
        if not scheduled:
            return
        batch = Batch.of([(r, r.computed, r.computed + new) for r, new in scheduled])
        self.pipeline.begin_step()
        last = data.draw(st.sampled_from(self.targets))
        for layer in self.targets:
            self.forward.layer(
                layer,
                batch,
                stop=data.draw(st.sampled_from(["", "acquire", "write"])) if layer == last else "",
            )
            if layer == last:
                break
        for request in self.requests:
            if request.serial > last_serial:  # a twin: its prefix was never computed
                self._free(request)
        if data.draw(st.booleans()):
            self.pipeline.end_step()
            self.memory.poison_shared_windows()

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.retired.append(tuple(request.blocks[: request.computed // self.tokens]))
        self._free(request)

    @rule()
    def step_without_tokens(self) -> None:
        self.pipeline.begin_step()
        self.pipeline.end_step()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "pipeline") and self.gate_class is SlotGate:
            self.pipeline.check_integrity()
            self.inner_engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "inner_engine"):
            self.inner_engine.close(30.0)
            self.memory.close()

    def _new_request(self, prefix: tuple[int, ...]) -> None:
        self.serial += 1
        for block in prefix:
            self.holders[block] += 1
        self.requests.append(
            Request(serial=self.serial, blocks=list(prefix), computed=len(prefix) * self.tokens)
        )

    def _schedule(self, data: st.DataObject) -> list[tuple[Request, int]]:
        """Pick requests and chunks, find blocks for them and for drafts, preempting others where needed."""
        chosen = data.draw(st.lists(st.sampled_from(self.requests), unique_by=id, min_size=1))
        scheduled: list[tuple[Request, int]] = []
        for request in chosen:
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
                block = data.draw(st.sampled_from([at for at, n in enumerate(self.holders) if n == 0]))
                self.holders[block] = 1
                self.memory.forget_block(block)
                self.retired = [prefix for prefix in self.retired if block not in prefix]
                request.blocks.append(block)
            scheduled.append((request, new))
            if len(self.requests) < MOST_REQUESTS and data.draw(st.integers(0, 3)) == 0:
                # A twin in the same step: its prefix is being computed by this very forward.
                full = (request.computed + new) // self.tokens
                self._new_request(tuple(request.blocks[:full]))
                chosen.append(self.requests[-1])
        return scheduled

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
    run_state_machine_as_test(LayerwiseMachine, settings=SETTINGS(max_examples=100, stateful_step_count=20))


def test_M4_attention_reads_what_plain_vllm_would_with_copy_threads():  # noqa: N802
    class Threaded(LayerwiseMachine):
        engine_class = ThreadEngine

    run_state_machine_as_test(Threaded, settings=SETTINGS(max_examples=40, stateful_step_count=15))


class OpenGate(SlotGate):
    """Lets anybody in, and tells nobody who is still reading."""

    def claim(self, slot: Any, layer: int, *, ordered_behind: frozenset[Obligation] = frozenset()) -> None:
        super().claim(slot, layer, ordered_behind=super().pending(slot))

    def pending(self, slot: Any) -> frozenset[Obligation]:
        return frozenset()


class KeepsResidents(LayerwisePipeline):
    """Trusts a window to hold in this step what it held in the step before."""

    def begin_step(self, arrivals: Any = None) -> None:
        residents = dict(self._resident)
        super().begin_step(arrivals)
        self._resident.update(residents)


class MistakesResidents(LayerwisePipeline):
    """Takes the rows of the slot's last layer for those of the next."""

    def _start_load(self, layer: int, blocks: StepBlocks) -> CopyToken:
        resident = self._resident.get(self._plan.slot_of(layer))
        if resident is not None:
            resident.layer = layer
        return super()._start_load(layer, blocks)


@pytest.mark.parametrize(
    "broken",
    [
        {"dropped_lanes": frozenset({LOAD_LANE})},
        {"dropped_lanes": frozenset({SAVE_LANE})},
        {"gate_class": OpenGate},
        {"pipeline_class": KeepsResidents},
        {"pipeline_class": MistakesResidents},
    ],
    ids=["loads dropped", "saves dropped", "gate bypassed", "drafts not reloaded", "wrong layer taken"],
)
def test_the_machine_finds_a_broken_data_path(broken: dict[str, Any]):
    machine = type("Broken", (LayerwiseMachine,), broken)
    with pytest.raises(AssertionError, match="M4"):
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
