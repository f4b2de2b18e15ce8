"""Greedy float32 answers of Hugging Face transformers, which shares no code with us."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Two float32 implementations differ by about 1e-5 in a logit; a smaller gap than this decides nothing.
SMALLEST_MEANINGFUL_GAP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Reference:
    tokens: list[list[int]]  # per prompt, the new tokens
    logprobs: list[list[float]]  # theirs
    smallest_gap: float  # between the best and the second logit, over all steps


def greedy(
    path: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    change: Callable[[Any], None] | None = None,
) -> Reference:
    """Decode `new_tokens` tokens after each prompt, ignoring end-of-text.

    `change` is given the model first, to make it another one. Raises AssertionError when a step was a near
    tie, because equality with it would prove nothing.
    """
    import torch
    import transformers

    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    # By name: importing vLLM re-registers some model types, and AutoModel would then pick another class.
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if change is not None:
        change(model)
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    smallest_gap = float("inf")
    with torch.no_grad():
        for prompt in prompts:
            result = model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens.append(result.sequences[0, len(prompt) :].tolist())
            logprobs.append([float(logits[0].log_softmax(-1).max()) for logits in result.logits])
            for logits in result.logits:
                best, second = logits[0].topk(2).values.tolist()
                smallest_gap = min(smallest_gap, best - second)
    assert smallest_gap > SMALLEST_MEANINGFUL_GAP, (
        f"{path.name}: a greedy step has a logit gap of {smallest_gap:.1e}"
    )
    return Reference(tokens=tokens, logprobs=logprobs, smallest_gap=smallest_gap)
