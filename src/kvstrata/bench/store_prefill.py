"""Layerwise prefill with each store: what saving a prompt costs, and what finding it there saves.

Every turn serves a prompt that no engine has seen: plain vLLM computes it; kvstrata computes it and offers
its blocks to the store; kvstrata serves it again out of the store. Both engines are real and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from kvstrata.bench.decode import spread_prompts
from kvstrata.bench.engine_process import EngineProcess
from kvstrata.demo.model import find_model
from kvstrata.demo.prompt import encoder, handbook
from kvstrata.errors import KVStrataError, StoreError
from kvstrata.terminal import Terminal

# After a run, OpenMP threads spin for a moment; the other engine's turn starts when they sleep.
QUIET_S = 0.4
WARM_UPS = 1


@dataclass(frozen=True, kw_only=True)
class StorePrefillOptions:
    """What is measured; all of it goes into the result file."""

    repeats: int = 5
    prompt_tokens: int = 1500
    device_kv_budget_bytes: int = 48 << 20  # fits the prompt with and without kvstrata
    max_batched_tokens: int = 512
    num_shared_buffers: int = 2


@dataclass(frozen=True, kw_only=True)
class StorePrefillRuns:
    """Seconds of every turn, in order."""

    plain_s: tuple[float, ...]
    saved_s: tuple[float, ...]  # computed by kvstrata, and offered to the store
    found_s: tuple[float, ...]  # the same prompt again
    fetched_blocks: int  # out of the store, over all turns

    def ratios(self) -> dict[str, float]:
        """Medians of the times of a turn over plain vLLM's in the same turn."""
        return {
            "saved": median(a / b for a, b in zip(self.saved_s, self.plain_s, strict=True)),
            "found": median(a / b for a, b in zip(self.found_s, self.plain_s, strict=True)),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the raw runs."""
        return asdict(self)


class Prefiller(Protocol):
    """The part of an engine that is measured; `EngineProcess` is one."""

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Time one prefill."""

    def answer_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return some greedy tokens."""

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""


# Opens plain vLLM and kvstrata on the store that this connector configuration names.
OpenBoth = Callable[
    [Mapping[str, Any], Mapping[str, str]], AbstractContextManager[tuple[Prefiller, Prefiller]]
]


def store_prompts(options: StorePrefillOptions) -> list[tuple[int, ...]]:
    """Return a prompt for each turn; no two of them begin alike."""
    text = encoder(find_model(None))(handbook())
    turns = WARM_UPS + options.repeats
    while len(text) < 2 * options.prompt_tokens:
        text = text + text
    length = options.prompt_tokens
    return spread_prompts(text, turns, shortest_tokens=length, longest_tokens=length)


def measure_store_prefill(
    options: StorePrefillOptions,
    open_both: OpenBoth,
    prompts: Sequence[Sequence[int]],
    *,
    connector: Mapping[str, Any],
    environment: Mapping[str, str],
    pause: Callable[[float], None] = time.sleep,
) -> StorePrefillRuns:
    """Time prefills with the store that `connector` names.

    Raises KVStrataError if the engines answer differently or if nothing was found in the store.
    """
    runs: list[tuple[float, float, float]] = []
    with open_both(connector, environment) as (plain, ours):
        for prompt in prompts:
            turn = []
            for engine in (plain, ours, ours):
                pause(QUIET_S)
                turn.append(engine.prefill_s(prompt))
            runs.append((turn[0], turn[1], turn[2]))
        if plain.answer_ids(prompts[-1]) != ours.answer_ids(prompts[-1]):
            raise KVStrataError("a prompt out of the store is answered differently; run `kvstrata demo`")
        fetched = sum(int(rank["fetched_blocks"]) for rank in ours.worker_statistics())
    if not fetched:
        raise StoreError("nothing was found in the store: its time is not one of the store")
    plain_s, saved_s, found_s = zip(*runs[WARM_UPS:], strict=True)
    return StorePrefillRuns(plain_s=plain_s, saved_s=saved_s, found_s=found_s, fetched_blocks=fetched)


def engines_on(options: StorePrefillOptions, terminal: Terminal) -> OpenBoth:
    """Return the opener of real engines, each in a process of its own."""
    model = find_model(None)
    shared = {
        "model": str(model),
        "device_kv_budget_bytes": options.device_kv_budget_bytes,
        "max_batched_tokens": options.max_batched_tokens,
    }

    @contextmanager
    def open_both(
        connector: Mapping[str, Any], environment: Mapping[str, str]
    ) -> Iterator[tuple[Prefiller, Prefiller]]:
        layers = {"use_layerwise": True, "layerwise_num_shared_buffers": options.num_shared_buffers}
        transfer = {
            **connector,
            "kv_connector_extra_config": {**connector["kv_connector_extra_config"], **layers},
        }
        with (
            EngineProcess("plain", shared) as plain,
            EngineProcess(
                "kvstrata",
                {**shared, "extra_arguments": {"kv_transfer_config": transfer}},
                environment=environment,
            ) as ours,
        ):
            with terminal.step("two engines start"):
                plain.wait_until_ready()
                ours.wait_until_ready()
            yield plain, ours

    return open_both


def local_store_config(path: Path, size_bytes: int) -> dict[str, Any]:
    """Return the connector configuration of an embedded store of one's own."""
    from kvstrata.serve_store.plan import GIB, connector_config

    return connector_config({"backend": "local", "store_path": str(path), "store_size_GB": size_bytes / GIB})
