"""`kvstrata demo`: find the model, build the prompt, open real engines, print and write the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.bench.machine import describe_machine
from kvstrata.core.budget import sparse_capacity_formula
from kvstrata.demo import kvpp, report
from kvstrata.demo.layerwise import formula
from kvstrata.demo.model import ModelShape, find_model
from kvstrata.demo.pd import PdPrompts
from kvstrata.demo.pd_servers import PdEngines, open_pd_servers
from kvstrata.demo.prompt import DemoPrompt, build_prompt, encoder, handbook
from kvstrata.demo.run import DemoResult, Formulas, run_demo
from kvstrata.demo.serving import (
    ANSWER_TOKENS,
    BROADCASTS_SKIPPED,
    KVPP,
    LAYERWISE,
    LOADS_SKIPPED,
    PLAIN,
    SPARSE,
    STALE_ROWS,
    TWO_RANKS,
    Engine,
    Servings,
)
from kvstrata.demo.two_ranks import TwoRanks, two_rank_arguments
from kvstrata.terminal import engine_noise_to

NUM_INDEPENDENT = 1  # kvstrata's default: the first layer keeps a buffer of its own
SEQUENCES = 1  # sparse offload sets hot rows aside for every sequence that may run


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's options, with the values it runs with when nothing is said."""

    model: Path | None = None
    prompt_tokens: int = 2000
    pass_key: str = "48213"
    depth: float = 0.15  # early in the text, so that every later chunk needs it loaded back
    device_kv_budget_bytes: int = 20 << 20
    roomy_kv_budget_bytes: int = 64 << 20
    kvpp_kv_budget_bytes: int = 28 << 20  # of each of two ranks: the prompt fits with KVPP, and not without
    max_batched_tokens: int = 512  # four chunks at 2000 tokens: three of them reload their prefix
    num_shared_buffers: int = 2
    prefetch_layers: int = 1
    timed_runs: int = 3
    decode_tokens: int = 64  # far beyond the answer, so that the hit rate means something
    hot_rows_per_topk: int = 2  # hot rows of a request, in top-k sizes
    # Prefill and decode serve these, too: (length, pass key); the control hides another key in the first.
    pd_prompts: tuple[tuple[int, str], ...] = ((600, "90561"), (800, "13579"), (400, "24680"))
    pd_control_pass_key: str = "16509"


def demo(options: DemoOptions, *, json_file: Path | None, log: Path) -> DemoResult:
    """Run the demonstration for a person at a terminal, and write `json_file` whatever the outcome.

    Engine output goes to `log`. Raises ConfigurationError if there is no model, and what the engines raise.
    """
    model = find_model(options.model)
    shape = ModelShape.of(model)
    encode, text = encoder(model), handbook()

    def prompt_of(prompt_tokens: int, pass_key: str) -> DemoPrompt:
        return build_prompt(
            encode, text=text, prompt_tokens=prompt_tokens, pass_key=pass_key, depth=options.depth
        )

    prompt = prompt_of(options.prompt_tokens, options.pass_key)
    two_ranks = TwoRanks.here()
    with engine_noise_to(log) as terminal:
        terminal.console.print(
            f"A handbook of {len(prompt.token_ids)} tokens hides a pass key "
            f"at token {prompt.fact_position_tokens}. "
            f"Engine output goes to {log} and {log.with_suffix('')}/."
        )
        result = run_demo(
            Servings(
                open_engine=lambda budget, mode: _open(model, shape, options, two_ranks, budget, mode),
                prompt=prompt,
                terminal=terminal,
            ),
            open_deployment=lambda: open_pd_servers(_pd_engines(model, shape, options, log.with_suffix(""))),
            pd_prompts=_pd_prompts(options, prompt_of),
            small_bytes=options.device_kv_budget_bytes,
            roomy_bytes=options.roomy_kv_budget_bytes,
            kvpp_bytes=options.kvpp_kv_budget_bytes,
            kvpp_skip_reason=two_ranks.skip_reason,
            formulas=_formulas(shape, options),
            timed_prefills=options.timed_runs,
            decode_tokens=options.decode_tokens,
        )
        terminal.console.print(report.as_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(report.as_json(result, describe_machine()), indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def _pd_prompts(options: DemoOptions, prompt_of: Callable[[int, str], DemoPrompt]) -> PdPrompts:
    more = tuple(prompt_of(length, pass_key) for length, pass_key in options.pd_prompts)
    length, _ = options.pd_prompts[0]
    return PdPrompts(more=more, control=more[0], control_other=prompt_of(length, options.pd_control_pass_key))


def _pd_engines(model: Path, shape: ModelShape, options: DemoOptions, log_directory: Path) -> PdEngines:
    return PdEngines(
        model=model,
        device_kv_budget_bytes=options.device_kv_budget_bytes,
        max_model_len=options.prompt_tokens + ANSWER_TOKENS,
        max_batched_tokens=options.max_batched_tokens,
        max_num_seqs=1 + len(options.pd_prompts),
        num_shared_buffers=options.num_shared_buffers,
        prefetch_layers=options.prefetch_layers,
        topk_buffer_size=options.hot_rows_per_topk * shape.index_topk,
        log_directory=log_directory,
    )


def _formulas(shape: ModelShape, options: DemoOptions) -> Formulas:
    hot_rows = SEQUENCES * options.hot_rows_per_topk * shape.index_topk
    return Formulas(
        layerwise=formula(
            num_layers=shape.num_layers,
            num_independent=NUM_INDEPENDENT,
            num_shared_buffers=options.num_shared_buffers,
        ),
        sparse=sparse_capacity_formula(
            device_bytes=options.device_kv_budget_bytes,
            hot_rows_bytes=hot_rows * shape.num_layers * shape.main_row_bytes,
            indexer_bytes=shape.num_layers * shape.indexer_row_bytes,
            logical_bytes=shape.num_layers * (shape.main_row_bytes + shape.indexer_row_bytes),
        ),
        kvpp=kvpp.formula(num_layers=shape.num_layers),
    )


@contextmanager
def _open(
    model: Path, shape: ModelShape, options: DemoOptions, two_ranks: TwoRanks, budget_bytes: int, mode: str
) -> Iterator[Engine]:
    from kvstrata.vllm.engines import LayerwiseOptions, SparseOptions, open_engine

    def layerwise(fault: str | None) -> dict[str, Any]:
        return {
            "layerwise": LayerwiseOptions(
                num_shared_buffers=options.num_shared_buffers,
                prefetch_layers=options.prefetch_layers,
                fault=fault,
            )
        }

    def sparse(fault: str | None) -> dict[str, Any]:
        hot_rows = options.hot_rows_per_topk * shape.index_topk
        return {
            "sparse": SparseOptions(
                topk_buffer_size=hot_rows,
                fault=fault,
            ),
            "max_num_seqs": SEQUENCES,
        }

    features: dict[str, dict[str, Any]] = {
        PLAIN: {},
        LAYERWISE: layerwise(None),
        LOADS_SKIPPED: layerwise("skip_loads"),
        SPARSE: sparse(None),
        STALE_ROWS: sparse("stale_rows"),
        TWO_RANKS: {"extra_arguments": two_rank_arguments()},
        KVPP: {"extra_arguments": two_rank_arguments(kvpp={})},
        BROADCASTS_SKIPPED: {"extra_arguments": two_rank_arguments(kvpp={"fault": "skip_loads"})},
    }
    environment = two_ranks.applied() if "extra_arguments" in features[mode] else nullcontext()
    with (
        environment,
        open_engine(
            model,
            device_kv_budget_bytes=budget_bytes,
            max_batched_tokens=options.max_batched_tokens,
            **features[mode],
        ) as engine,
    ):
        yield engine
