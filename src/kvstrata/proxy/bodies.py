"""The client's request body: what is refused, how it is split, what decode and prefill are sent of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstrata.proxy.failures import Refused
from kvstrata.remote.metaserver import Advert

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_CHARACTERS_PER_TOKEN = 4  # good enough to compare loads
_MOST_SAMPLES = 1 << 14
_LEAST_TEMPERATURE = 1e-5  # below it vLLM takes the best token
# What prefill is not told: how the answer is to look, how its tokens are chosen, and what does not go with a
# single token. Nobody reads that token, and choosing it can break an engine: vLLM 0.32 ends on CPUs when a
# prompt with a seed takes several steps.
_NOT_FOR_PREFILL = frozenset(
    (
        *("stream", "stream_options", "n", "best_of", "use_beam_search", "request_id"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo"),
        *("return_token_ids", "return_tokens_as_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "bad_words"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
        *("structured_outputs", "thinking_token_budget"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Child:
    """One prompt of a request, and one sample of it: what one decode request is made of."""

    number: int
    body: Mapping[str, Any]
    first_choice: int  # index of its first choice among all choices of the answer
    is_first_sample: bool  # its prompt counts in `usage`
    load_tokens: int  # roughly


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked request."""

    path: str
    is_stream: bool
    children: tuple[Child, ...]
    wants_remote: bool  # prefill may compute the prompt
    request_id: str | None  # of the body

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat completion."""
        return self.path == CHAT


def parse(path: str, raw: bytes, *, most_children: int) -> Job:
    """Check a request body and split it; raises Refused (400) with what is wrong.

    What only the engine can judge is left to it.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    _refuse_what_is_ours(body)
    is_stream = body.get("stream")
    if not (is_stream is None or isinstance(is_stream, bool)):
        raise Refused(400, f"stream={is_stream!r}: set true or false", param="stream")
    request_id = body.get("request_id")
    children = _split(path, body, most_children)
    return Job(
        path=path,
        is_stream=bool(is_stream),
        children=children,
        wants_remote=_wants_remote(body),
        request_id=request_id if isinstance(request_id, str) else None,
    )


def _refuse_what_is_ours(body: Mapping[str, Any]) -> None:
    extra = body.get("vllm_xargs")
    for where, holder in (("kv_transfer_params", body), ("vllm_xargs.kv_transfer_params", extra)):
        if isinstance(holder, dict) and holder.get("kv_transfer_params") is not None:
            message = f"{where} is set by the proxy and not taken from clients; remove it"
            raise Refused(400, message, param=where)
    if body.get("prompt_embeds") is not None:
        raise Refused(400, "prompt_embeds is not supported; send prompt", param="prompt_embeds")


def _wants_remote(body: Mapping[str, Any]) -> bool:
    """Whether decode can do without computing the prompt, and prefill would make the same tokens of it.

    Log-probabilities of the prompt are made where the prompt is computed; beams share no transfer; and what
    -1 truncates to depends on max_tokens, which prefill is told otherwise.
    """
    computes_itself = (
        body.get("prompt_logprobs") is not None or body.get("echo") or body.get("use_beam_search")
    )
    is_cut_by_answer = body.get("truncate_prompt_tokens") == -1
    has_answer = body.get("max_tokens") != 0
    return not computes_itself and not is_cut_by_answer and has_answer


def _split(path: str, body: dict[str, Any], most_children: int) -> tuple[Child, ...]:
    prompts = [None] if path == CHAT else _prompts(body.get("prompt"))
    choices, samples = 1, 1
    n = body.get("n")
    if type(n) is int and 1 < n < _MOST_SAMPLES:
        choices = n
        # A beam search is one search of n beams; samples are independent, and each needs its own transfer.
        # Greedy samples are all the same: the engine says that it does not make them.
        samples = 1 if body.get("use_beam_search") or _is_greedy(body) else n
    if len(prompts) * samples > most_children:
        message = f"{len(prompts)} prompts x n={samples} are more than {most_children} requests; send fewer"
        raise Refused(400, message, param="prompt")
    children: list[Child] = []
    for at, prompt in enumerate(prompts):
        for sample in range(samples):
            children.append(
                Child(
                    number=len(children),
                    body=_child_body(body, prompt, sample, samples),
                    first_choice=at * choices + sample,
                    is_first_sample=sample == 0,
                    load_tokens=_load_tokens(body.get("messages") if prompt is None else prompt),
                )
            )
    return tuple(children)


def _is_greedy(body: Mapping[str, Any]) -> bool:
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature < _LEAST_TEMPERATURE


def _child_body(body: dict[str, Any], prompt: Any, sample: int, samples: int) -> dict[str, Any]:
    child = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if prompt is not None:
        child["prompt"] = prompt
    if samples > 1:
        child["n"] = 1
        if isinstance(child.get("seed"), int):
            child["seed"] += sample  # as vLLM does, or all samples would be one
    return child


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Refused(400, "prompt is not a string, nor a list with something in it", param="prompt")
    if all(type(token) is int for token in prompt):
        return [prompt]
    for at, one in enumerate(prompt):
        if not isinstance(one, str) and not (
            isinstance(one, list) and all(type(token) is int for token in one)
        ):
            message = f"prompt[{at}] is neither a string nor a list of token ids"
            raise Refused(400, message, param="prompt")
    return prompt


def _load_tokens(prompt: Any) -> int:
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return max(1, len(prompt))
    return max(1, _characters(prompt) // _CHARACTERS_PER_TOKEN)


def _characters(part: Any, depth: int = 0) -> int:
    if isinstance(part, str):
        return len(part)
    if depth == 4:  # messages -> content parts -> text; deeper is no prompt
        return 0
    if isinstance(part, dict):
        part = list(part.values())
    return sum(_characters(inner, depth + 1) for inner in part) if isinstance(part, list) else 0


def decode_body(body: Mapping[str, Any], transfer: str | None, metaserver_url: str) -> bytes:
    """Return what decode is sent; without a transfer it computes the prompt itself."""
    if transfer is None:
        return msgspec.json.encode(body)
    params = {"do_remote_prefill": True, "transfer_id": transfer, "metaserver": metaserver_url}
    return msgspec.json.encode({**body, "kv_transfer_params": params})


def prefill_body(body: Mapping[str, Any], advert: Advert, *, is_chat: bool) -> bytes:
    """Return what prefill is sent: the prompt, one token to make, and where decode wants the KV."""
    remote = {
        "host": advert.host,
        "kv_port": advert.kv_port,
        "tp_size": advert.tp_size,
        "dp_rank": advert.dp_rank,
        "first_block": advert.first_block,
    }
    prefill = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    prefill["max_completion_tokens" if is_chat else "max_tokens"] = 1
    # Without an end of text, so that it always ends for the same reason.
    prefill |= {"n": 1, "stream": False, "temperature": 0, "ignore_eos": True}
    params = {"do_remote_decode": True, "transfer_id": advert.transfer_id, "remote": remote}
    return msgspec.json.encode({**prefill, "kv_transfer_params": params})
