"""Run an engine in a process of its own: a parallel one, a second one on a store, one without plugins.

`ask_in_new_process` hands it a job and takes its answer, both in JSON files. Where imports read what a test
changes in the environment, the process is `python engine_process.py JOB ANSWER`, which imports anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import warm_process

DEADLINE_S = 240
_OVERRUN = f"no end after {DEADLINE_S} s"


@dataclass(frozen=True, kw_only=True)
class ProcessAnswer:
    """What the engine of the other process said."""

    tokens: list[list[list[int]]]  # [batch][prompt][token]
    cached_tokens: list[list[int]]  # [batch][prompt]
    num_blocks: int
    statistics: list[dict[str, Any]]  # of every rank; empty without kvstrata's worker
    worker: str  # its class, with its module
    platform: str  # its class
    attention: list[str]  # modules of the attention backends; empty where workers have their own processes
    said: dict[str, list[Any]]  # by call, what every rank returned
    accepted_drafts: float  # tokens


def ask_in_new_process(
    arguments: Mapping[str, Any],
    batches: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    *,
    directory: Path,
    lose: Mapping[int, str] | None = None,
    environment: Mapping[str, str] | None = None,
    calls: Sequence[str] = (),
    imports_anew: bool = False,
) -> ProcessAnswer:
    """Ask batches of prompts, one after the other, of an engine with these `vllm.LLM` arguments.

    `lose` maps a batch to a rank, such as "tp1of2": what that rank is about to fetch from the store during
    that batch is removed after the lookup, in spite of its leases.
    `calls` names methods of the workers, which are called before the first batch.
    `imports_anew`: `environment` changes what imports read, such as VLLM_PLUGINS or LD_PRELOAD.
    Raises AssertionError with the end of the process's output when it fails or overruns its deadline.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job, answer, log = directory / "job.json", directory / "answer.json", directory / "log.txt"
    job.write_text(
        json.dumps(
            {
                "arguments": dict(arguments),
                "batches": [[list(prompt) for prompt in prompts] for prompts in batches],
                "new_tokens": new_tokens,
                "lose": [(lose or {}).get(at) for at in range(len(batches))],
                "calls": list(calls),
            }
        )
    )
    answer.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    run = _run_anew if imports_anew else _run_warm
    status = run(str(job), str(answer), environment or {}, log)
    assert status == 0, f"engine process: status {status}\n{log.read_text()[-6000:]}"
    return ProcessAnswer(**json.loads(answer.read_text()))


def _run_warm(job: str, answer: str, environment: Mapping[str, str], log: Path) -> int | str:
    process = warm_process.start(main, job, answer, changes=environment, log=log)
    try:
        process.join(DEADLINE_S)
        return _OVERRUN if process.exitcode is None else process.exitcode
    finally:
        if process.is_alive():
            process.kill_family()


def _run_anew(job: str, answer: str, environment: Mapping[str, str], log: Path) -> int | str:
    with log.open("w") as output:
        try:
            return subprocess.run(
                [sys.executable, __file__, job, answer],
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DEADLINE_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return _OVERRUN


@contextlib.contextmanager
def losing_objects_of(rank: str | None) -> Iterator[None]:
    """Between lookup and fetch, remove the objects that a rank was promised; None loses nothing."""
    if rank is None:
        yield
        return
    from kvstrata.vllm.scheduler_side import StoreScheduler

    step = StoreScheduler.step

    def lossy_step(self: StoreScheduler, output: Any) -> Any:
        transfers = step(self, output)
        leases = [lease for fetch in transfers.fetches for lease in fetch.leases.values()]
        self._store.remove([lease.key for lease in leases if rank in lease.key.rank], force=True)
        return transfers

    StoreScheduler.step = lossy_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        StoreScheduler.step = step  # type: ignore[method-assign]


def main(job_file: str, answer_file: str) -> None:
    from engines import STATISTICS, Engine
    from vllm import LLM
    from vllm.platforms import current_platform

    job = json.loads(Path(job_file).read_text())
    engine = Engine(LLM(**job["arguments"]))
    said = {call: engine.llm.collective_rpc(call) for call in job["calls"]}
    outcomes = []
    for prompts, rank in zip(job["batches"], job["lose"], strict=True):
        with losing_objects_of(rank):
            outcomes.append(engine.ask(prompts, job["new_tokens"], logprobs=False))
    vllm_config = engine.llm.llm_engine.vllm_config
    is_ours = vllm_config.parallel_config.worker_cls.startswith("kvstrata.")
    result = ProcessAnswer(
        tokens=[outcome.tokens for outcome in outcomes],
        cached_tokens=[outcome.cached_tokens for outcome in outcomes],
        num_blocks=engine.num_blocks(),
        worker=vllm_config.parallel_config.worker_cls,
        platform=type(current_platform).__name__,
        attention=sorted(
            {
                layer.get_attn_backend().__module__
                for layer in vllm_config.compilation_config.static_forward_context.values()
                if hasattr(layer, "get_attn_backend")
            }
        ),
        statistics=engine.llm.collective_rpc(STATISTICS) if is_ours else [],
        said=said,
        accepted_drafts=engine.counter("vllm:spec_decode_num_accepted_tokens"),
    )
    Path(answer_file).write_text(json.dumps(asdict(result)))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
