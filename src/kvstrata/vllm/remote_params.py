"""`kv_transfer_params` of a request, as the proxy sets them; checked before anything is believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_MAX_ID = 256
_MAX_URL = 2048


@dataclass(frozen=True, kw_only=True)
class PullParams:
    """Decode: the prompt's rows will come from a prefill engine; the metaserver finds one."""

    transfer: str
    metaserver: str


@dataclass(frozen=True, kw_only=True)
class SendParams:
    """Prefill: a decode engine waits for the prompt's rows from ``first_block`` on."""

    transfer: str
    host: str
    kv_port: int
    tp_size: int
    dp_rank: int
    first_block: int


def parse_params(given: Any) -> PullParams | SendParams | None:
    """Return what a request asks of remote read, None for nothing; ValueError says what is wrong."""
    if not isinstance(given, dict):
        return None
    if given.get("do_remote_prefill") is True:
        return PullParams(transfer=_transfer(given), metaserver=_text(given, "metaserver", _MAX_URL))
    if given.get("do_remote_decode") is not True:
        return None
    remote = given.get("remote")
    if not isinstance(remote, dict):
        raise ValueError(f"kv_transfer_params.remote={remote!r:.80} is not an object")
    return SendParams(
        transfer=_transfer(given),
        host=_text(remote, "host", _MAX_ID),
        kv_port=_whole(remote, "kv_port", 1, 65535),
        tp_size=_whole(remote, "tp_size", 1, 1 << 16),
        dp_rank=_whole(remote, "dp_rank", 0, 1 << 16),
        first_block=_whole(remote, "first_block", 0, 1 << 40),
    )


def _transfer(given: dict[str, Any]) -> str:
    return _text(given, "transfer_id", _MAX_ID)


def _text(given: dict[str, Any], name: str, longest: int) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise ValueError(
            f"kv_transfer_params.{name}={value!r:.80} is not a text of 1 to {longest} characters"
        )
    return value


def _whole(given: dict[str, Any], name: str, least: int, most: int) -> int:
    try:
        value = msgspec.convert(given.get(name), int, strict=True)
    except msgspec.ValidationError as trouble:
        raise ValueError(f"kv_transfer_params.{name}: {trouble}") from None
    if not least <= value <= most:
        raise ValueError(f"kv_transfer_params.{name}={value} is outside {least}..{most}")
    return value
