"""Compare vLLM's greedy output with the reference outputs in ref.json, token by token.

    python check_vllm.py tiny-dsv32 ref.json
    python check_vllm.py tiny-dsv32 ref.json '{"max_num_batched_tokens": 256}'     (any LLM(...) argument, as JSON)

Exit code 1 if a prompt differs. Every prompt is run twice: the second pass is served from vLLM's prefix cache.
"""

import json
import sys
import time
from pathlib import Path


def main() -> int:
    checkpoint, reference = sys.argv[1:3]
    overrides = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}

    from vllm import LLM, SamplingParams

    cases = json.loads(Path(reference).read_text())
    arguments = dict(
        model=checkpoint,
        dtype="float32",
        max_model_len=2304,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=2304,
    )
    llm = LLM(**{**arguments, **overrides})
    differing = 0
    for attempt in ("cold", "prefix cached"):
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": case["prompt"]} for case in cases],
            [SamplingParams(temperature=0, max_tokens=len(case["out"]), ignore_eos=True) for case in cases],
            use_tqdm=False,
        )
        for case, output in zip(cases, outputs, strict=True):
            got, want = list(output.outputs[0].token_ids), case["out"]
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
            differing += at is not None
            verdict = "equal" if at is None else f"differs from token {at} of {len(want)}"
            print(f"{attempt:13} {case['name']:14} {len(case['prompt']):5} prompt tokens  {verdict}", flush=True)
        print(f"{attempt}: {time.perf_counter() - started:.1f} s", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
