"""The demonstration's prompt: pages of a handbook with a pass key hidden in them, and the question for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvstrata.errors import KVStrataError

OPENING = "<s><|user|>"
QUESTION = "What is the pass key?<|assistant|>"


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """A prompt in the shipped model's format, and what a reader of the text would answer."""

    token_ids: tuple[int, ...]
    text: str
    fact_position_tokens: int  # where the line with the pass key starts
    expected_answer: str


def handbook() -> str:
    """Return the text that ships with kvstrata: a lighthouse keeper's handbook of about 2,500 tokens."""
    return resources.files("kvstrata.demo").joinpath("handbook.txt").read_text(encoding="utf-8")


def build_prompt(
    encode: Callable[[str], list[int]],
    *,
    text: str,
    prompt_tokens: int,
    pass_key: str,
    depth: float,
) -> DemoPrompt:
    """Return at most `prompt_tokens` tokens: lines of `text`, the pass key at `depth` (0..1), the question.

    Blank lines are left out, others are whole. Raises KVStrataError if the text is too short to fill the
    prompt, because a short prompt would fit the small budget and show nothing.
    """
    fact = f"The pass key is {pass_key}.\n"
    opening, question, fact_ids = encode(OPENING), encode(QUESTION), encode(fact)
    room = prompt_tokens - len(opening) - len(question) - len(fact_ids)
    lines: list[tuple[str, list[int]]] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        ids = encode(line + "\n")
        if len(ids) > room:
            break
        lines.append((line + "\n", ids))
        room -= len(ids)
    else:
        raise KVStrataError(
            f"the text fills only {prompt_tokens - room} of prompt_tokens={prompt_tokens}; "
            "ask for fewer prompt tokens"
        )
    at = int(depth * len(lines))
    lines.insert(at, (fact, fact_ids))
    return DemoPrompt(
        token_ids=tuple(opening + [token for _, ids in lines for token in ids] + question),
        text=OPENING + "".join(line for line, _ in lines) + QUESTION,
        fact_position_tokens=len(opening) + sum(len(ids) for _, ids in lines[:at]),
        expected_answer=f"The pass key is {pass_key}.",
    )


def encoder(model: Path) -> Callable[[str], list[int]]:
    """Return the checkpoint's tokenizer as a function from text to ids, without added special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
