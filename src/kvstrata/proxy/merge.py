"""The answers to several prompts become one answer, with indices and usage as a single engine gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from kvstrata.proxy.bodies import Child
from kvstrata.proxy.events import DONE, DONE_EVENT, data_of
from kvstrata.proxy.failures import Refused

Answer = Callable[[Child], AsyncGenerator[bytes]]
_QUEUED_EVENTS = 64  # then children wait for the client


async def merged_answer(children: Sequence[Child], answer: Answer) -> bytes:
    """Return one JSON answer. Raises Refused for the first child that fails; the others are aborted."""
    bodies: dict[int, bytes] = {}
    async with aclosing(_together(children, answer)) as pieces:
        async for child, piece in pieces:
            bodies[child.number] = piece
    answers = [_parsed(bodies.get(child.number, b"")) for child in children]
    choices = []
    for child, one in zip(children, answers, strict=True):
        choices += [_placed(choice, child) for choice in one.get("choices", [])]
    usage = _summed([(child, one.get("usage")) for child, one in zip(children, answers, strict=True)])
    merged = {**answers[0], "choices": sorted(choices, key=lambda choice: int(choice["index"]))}
    return msgspec.json.encode(merged if usage is None else {**merged, "usage": usage})


async def merged_events(children: Sequence[Child], answer: Answer) -> AsyncGenerator[bytes]:
    """Yield the events of all children as they come, then their usage if it was asked for, then `[DONE]`.

    Raises Refused for the first child that fails; the others are aborted.
    """
    shared: dict[str, Any] = {}  # what the chunks of one answer have in common
    usages: list[tuple[Child, Any]] = []
    last: dict[str, Any] = {}
    async with aclosing(_together(children, answer)) as pieces:
        async for child, event in pieces:
            data = data_of(event)
            if data is None:
                yield event
            elif data != DONE:
                chunk = _parsed(data)
                if "error" in chunk:
                    error = chunk["error"]
                    code = error.get("code") if isinstance(error, dict) else None
                    raise Refused(code if isinstance(code, int) else 500, "an engine failed", body=data)
                shared = shared or {name: chunk[name] for name in ("id", "created") if name in chunk}
                chunk |= shared
                if chunk.get("choices"):
                    chunk["choices"] = [_placed(choice, child) for choice in chunk["choices"]]
                    yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
                else:
                    usages.append((child, chunk.get("usage")))
                    last = chunk
    usage = _summed(usages)
    if usage is not None:
        yield b"data: " + msgspec.json.encode({**last, "usage": usage}) + b"\n\n"
    yield DONE_EVENT


async def _together(children: Sequence[Child], answer: Answer) -> AsyncGenerator[tuple[Child, bytes]]:
    """Yield every child's pieces as they come; raises the first error and ends the other children."""
    queue: asyncio.Queue[tuple[Child, bytes] | None] = asyncio.Queue(_QUEUED_EVENTS)
    errors: list[BaseException] = []

    async def pump(child: Child) -> None:
        try:
            async with aclosing(answer(child)) as pieces:
                async for piece in pieces:
                    await queue.put((child, piece))
        except Exception as error:
            errors.append(error)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(child), name=f"child {child.number}") for child in children]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if errors:
                raise errors[0]
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        value = None
    if not isinstance(value, dict):
        raise Refused(502, f"decode answered with something that is not a JSON object: {body[:200]!r}")
    return value


def _placed(choice: dict[str, Any], child: Child) -> dict[str, Any]:
    return {**choice, "index": child.first_choice + int(choice.get("index", 0))}


def _summed(usages: Sequence[tuple[Child, Any]]) -> dict[str, Any] | None:
    """Add usage up; a prompt that was sampled several times counts once."""
    given = [(child, usage) for child, usage in usages if isinstance(usage, dict)]
    if not given:
        return None
    prompt = sum(usage.get("prompt_tokens") or 0 for child, usage in given if child.is_first_sample)
    completion = sum(usage.get("completion_tokens") or 0 for _, usage in given)
    summed = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = [usage.get("prompt_tokens_details") for child, usage in given if child.is_first_sample]
    cached = [detail.get("cached_tokens") or 0 for detail in details if isinstance(detail, dict)]
    return {**summed, "prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else summed
