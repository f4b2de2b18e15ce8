"""What the proxy refuses, how it splits a request, and what never reaches prefill."""

import json

import msgspec
import pytest
from proxy_fakes import SECRET, advert

from kvstrata.errors import ConfigurationError
from kvstrata.proxy.bodies import CHAT, COMPLETIONS, decode_body, parse, prefill_body
from kvstrata.proxy.events import data_of, error_in, split_events
from kvstrata.proxy.failures import Refused, error_body
from kvstrata.proxy.options import ProxyOptions


def job(path: str = COMPLETIONS, *, most_children: int = 8, **body):
    return parse(path, json.dumps(body).encode(), most_children=most_children)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}},
            "kv_transfer_params is set by the proxy",
        ),
        ({"prompt": "x", "kv_transfer_params": {}}, "kv_transfer_params is set by the proxy"),
        ({"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"prompt": "x", "stream": "false"}, "stream='false'"),
        ({"prompt": []}, "prompt is not"),
        ({"prompt": None}, "prompt is not"),
        ({"prompt": 5}, "prompt is not"),
        ({"prompt": ["x", 5]}, "prompt[1] is neither"),
        ({"prompt": ["x", [1, "y"]]}, "prompt[1] is neither"),
        ({"prompt": [True, False]}, "prompt[0] is neither"),
        ({"prompt": ["x"] * 9}, "9 prompts x n=1 are more than 8"),
        ({"prompt": ["x"] * 3, "n": 3}, "3 prompts x n=3 are more than 8"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds is not supported"),
    ],
)
def test_what_is_refused_says_why_in_openais_format(body, says: str):
    with pytest.raises(Refused) as refused:
        job(**body)
    assert refused.value.status == 400
    error = json.loads(refused.value.body)["error"]
    assert says in error["message"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'"x"', b"{", b"\xff\xfe", b"[" * 200_000, b'{"prompt": "\\ud800"}']
)
def test_what_is_not_a_json_object_is_refused(raw: bytes):
    with pytest.raises(Refused, match="the body is not"):
        parse(COMPLETIONS, raw, most_children=8)


def test_null_transfer_params_are_as_good_as_none_and_are_not_passed_on():
    (child,) = job(prompt="x", kv_transfer_params=None).children
    assert "kv_transfer_params" not in child.body


@pytest.mark.parametrize(
    ("body", "wants"),
    [
        ({}, True),
        ({"logprobs": 3}, True),
        ({"truncate_prompt_tokens": 5}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"use_beam_search": True}, False),
        ({"truncate_prompt_tokens": -1}, False),
        ({"max_tokens": 0}, False),
    ],
)
def test_prompts_that_decode_must_compute_itself_are_known(body, wants: bool):
    assert job(prompt="x", **body).wants_remote is wants


def test_loads_are_compared_in_tokens_whatever_the_prompt_is():
    assert job(prompt=[1] * 100).children[0].load_tokens == 100
    assert job(prompt="x" * 400).children[0].load_tokens == 100
    chat = job(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 392}]}])
    assert chat.children[0].load_tokens == 100
    assert job(prompt="").children[0].load_tokens == 1


def test_decode_is_sent_the_body_and_nothing_more_without_a_transfer():
    body = {"prompt": "x", "best": 1.5, "big": 1 << 53, "text": "ü"}
    assert json.loads(decode_body(body, None, "http://m")) == body
    sent = json.loads(decode_body(body, "t", "http://m"))
    assert sent.pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "metaserver": "http://m",
    }
    assert sent == body


def test_prefill_makes_one_token_whatever_the_client_wants():
    body = {
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "logprobs": True,
        "top_logprobs": 5,
        "prompt_logprobs": 1,
        "max_tokens": 100,
        "max_completion_tokens": 100,
        "min_tokens": 50,
        "stop": ["x"],
        "temperature": 1.5,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 7,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": 1},
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
    }
    sent = json.loads(prefill_body(body, advert("t"), is_chat=True))
    del sent["kv_transfer_params"]
    assert sent == {
        "messages": [],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
        "n": 1,
        "stream": False,
        "temperature": 0,
        "ignore_eos": True,
        "max_completion_tokens": 1,
    }


def test_a_missing_n_or_a_strange_one_is_left_to_decode():
    for n in (None, 0, -1, "2", 1.5, True):
        (child,) = job(prompt="x", n=n).children
        assert child.body["n"] == n


@pytest.mark.parametrize(("temperature", "requests"), [(0, 1), (0.0, 1), (0.5, 3), (None, 3), ("0", 3)])
def test_greedy_samples_are_left_to_decode_which_refuses_them(temperature: object, requests: int):
    children = job(prompt="x", n=3, temperature=temperature).children
    assert len(children) == requests
    assert children[0].body["n"] == (3 if requests == 1 else 1)


# Events


async def chunks(*pieces: bytes):
    for piece in pieces:
        yield piece


async def split(*pieces: bytes, most_bytes: int = 1000) -> list[bytes]:
    return [event async for event in split_events(chunks(*pieces), most_bytes)]


STREAM = b": ping\n\ndata: one\n\nevent: x\r\ndata: two\r\n\r\ndata: three\ndata: four\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_the_chunks_are_cut(size: int):
    import asyncio

    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    events = asyncio.run(split(*pieces))
    assert b"".join(events) == STREAM
    assert [data_of(event) for event in events] == [None, b"one", b"two", b"three\nfour", b"[DONE]"]


def test_an_unfinished_event_at_the_end_is_passed_on():
    import asyncio

    assert asyncio.run(split(b"data: one\n\ndata: tw")) == [b"data: one\n\n", b"data: tw"]


def test_an_endless_event_is_an_error():
    import asyncio

    with pytest.raises(ValueError, match="more than 1000 bytes"):
        asyncio.run(split(b"x" * 600, b"x" * 600))


def test_errors_in_a_stream_are_recognised_and_text_is_not():
    assert error_in(b'{"error": {"code": 400}}') == {"code": 400}
    assert error_in(b'{"choices": [{"text": "{\\"error\\""}]}') is None
    assert error_in(b'{"error": "text"}') is None
    assert error_in(b'{"error') is None


@pytest.mark.parametrize(
    ("status", "name"), [(404, "NotFoundError"), (503, "ServiceUnavailableError"), (599, "Error")]
)
def test_errors_are_named_as_vllm_names_them(status: int, name: str):
    assert msgspec.json.decode(error_body(status, "x"))["error"]["type"] == name


# Options


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decode": ()}, "--decode is missing"),
        ({"decode": ("127.0.0.1:8000",)}, "--decode=127.0.0.1:8000: not a URL"),
        ({"decode": ("http://a:99999",)}, "--decode=http://a:99999: not a URL"),
        ({"prefill": ("http://a:1", "http://a:1")}, "named twice"),
        ({"metaserver_url": "nowhere"}, "--metaserver-url=nowhere"),
        ({"deadline_s": 0.0}, "--deadline=0.0: set a number of seconds above 0"),
        ({"secret": b""}, "--secret is empty"),
    ],
)
def test_options_are_checked_and_named(changes, says: str):
    good = {"prefill": (), "decode": ("http://b:1",), "secret": SECRET, "metaserver_url": "http://m:1/x"}
    with pytest.raises(ConfigurationError) as error:
        ProxyOptions(**{**good, **changes})
    assert says in str(error.value)
