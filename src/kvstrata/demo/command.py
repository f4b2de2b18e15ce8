"""`kvstrata demo`: find the model, build the prompt, open real engines, print and write the result."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.bench.machine import describe_machine
from kvstrata.demo import report
from kvstrata.demo.prompt import build_prompt, encoder, handbook
from kvstrata.demo.run import LAYERWISE, LOADS_SKIPPED, PLAIN, DemoResult, Engine, formula, run_demo
from kvstrata.errors import ConfigurationError
from kvstrata.terminal import engine_noise_to

SHIPPED_MODEL = Path("examples/models/tiny-dsv32")
NUM_INDEPENDENT = 1  # kvstrata's default: the first layer keeps a buffer of its own


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's options, with the values it runs with when nothing is said."""

    model: Path | None = None
    prompt_tokens: int = 2000
    pass_key: str = "48213"
    depth: float = 0.15  # early in the text, so that every later chunk needs it loaded back
    device_kv_budget_bytes: int = 20 << 20
    roomy_kv_budget_bytes: int = 64 << 20
    max_batched_tokens: int = 512  # four chunks at 2000 tokens: three of them reload their prefix
    num_shared_buffers: int = 2
    prefetch_layers: int = 1
    timed_runs: int = 3


def demo(options: DemoOptions, *, json_file: Path | None, log: Path) -> DemoResult:
    """Run the demonstration for a person at a terminal, and write `json_file` whatever the outcome.

    Engine output goes to `log`. Raises ConfigurationError if there is no model, and what the engines raise.
    """
    model = find_model(options.model)
    num_layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    prompt = build_prompt(
        encoder(model),
        text=handbook(),
        prompt_tokens=options.prompt_tokens,
        pass_key=options.pass_key,
        depth=options.depth,
    )
    with engine_noise_to(log) as terminal:
        terminal.console.print(
            f"A handbook of {len(prompt.token_ids)} tokens hides a pass key "
            f"at token {prompt.fact_position_tokens}. "
            f"Engine output goes to {log}."
        )
        result = run_demo(
            lambda budget, mode: _open(model, options, budget, mode),
            prompt,
            device_kv_budget_bytes=options.device_kv_budget_bytes,
            roomy_kv_budget_bytes=options.roomy_kv_budget_bytes,
            capacity_ratio_formula=formula(
                num_layers=num_layers,
                num_independent=NUM_INDEPENDENT,
                num_shared_buffers=options.num_shared_buffers,
            ),
            timed_runs=options.timed_runs,
            terminal=terminal,
        )
        terminal.console.print(report.as_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(report.as_json(result, describe_machine()), indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def find_model(model: Path | None) -> Path:
    """Return the checkpoint to use: the one given, or the one that ships with kvstrata's source.

    Raises ConfigurationError if it is not there.
    """
    source = Path(__file__).resolve().parents[3]
    candidates = [model] if model is not None else [SHIPPED_MODEL, source / SHIPPED_MODEL]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigurationError(
        f"--model={candidates[0]}: no config.json there; run from a checkout of kvstrata, "
        "or give the directory of a checkpoint in the pass-key format of examples/models"
    )


def _open(model: Path, options: DemoOptions, budget_bytes: int, mode: str) -> AbstractContextManager[Engine]:
    from kvstrata.vllm.engines import LayerwiseOptions, open_engine

    faults: dict[str, str | None] = {LAYERWISE: None, LOADS_SKIPPED: "skip_loads"}
    layerwise: Any = None
    if mode != PLAIN:
        layerwise = LayerwiseOptions(
            num_shared_buffers=options.num_shared_buffers,
            prefetch_layers=options.prefetch_layers,
            fault=faults[mode],
        )
    return open_engine(
        model,
        device_kv_budget_bytes=budget_bytes,
        layerwise=layerwise,
        max_batched_tokens=options.max_batched_tokens,
    )
