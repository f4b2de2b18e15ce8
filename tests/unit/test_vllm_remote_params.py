"""What a request may ask of remote read, and what is refused with a reason."""

from __future__ import annotations

import pytest

from kvstrata.vllm.remote_params import PullParams, SendParams, parse_params

PULL = {"do_remote_prefill": True, "transfer_id": "t1", "metaserver": "http://127.0.0.1:1/v1/metaserver"}
REMOTE = {"host": "127.0.0.1", "kv_port": 1000, "tp_size": 1, "dp_rank": 0, "first_block": 2}
SEND = {"do_remote_decode": True, "transfer_id": "t1", "remote": REMOTE}


def test_decode_is_asked_to_pull():
    assert parse_params(PULL) == PullParams(transfer="t1", metaserver="http://127.0.0.1:1/v1/metaserver")


def test_prefill_is_asked_to_send():
    expected = SendParams(transfer="t1", host="127.0.0.1", kv_port=1000, tp_size=1, dp_rank=0, first_block=2)
    assert parse_params(SEND) == expected


@pytest.mark.parametrize(
    "given", [None, {}, [], "x", {"do_remote_prefill": False}, {"do_remote_decode": "true"}]
)
def test_whoever_asks_for_nothing_gets_nothing(given):
    assert parse_params(given) is None


@pytest.mark.parametrize(
    "given",
    [
        PULL | {"transfer_id": ""},
        PULL | {"transfer_id": 7},
        PULL | {"transfer_id": "x" * 257},
        PULL | {"transfer_id": "a\nb"},
        PULL | {"metaserver": None},
        SEND | {"remote": None},
        SEND | {"remote": REMOTE | {"kv_port": 0}},
        SEND | {"remote": REMOTE | {"kv_port": "1000"}},
        SEND | {"remote": REMOTE | {"tp_size": True}},
        SEND | {"remote": REMOTE | {"dp_rank": -1}},
        SEND | {"remote": REMOTE | {"first_block": 1.5}},
        SEND | {"remote": {key: value for key, value in REMOTE.items() if key != "host"}},
    ],
)
def test_nonsense_is_refused_by_name(given):
    with pytest.raises(ValueError, match=r"kv_transfer_params\."):
        parse_params(given)
