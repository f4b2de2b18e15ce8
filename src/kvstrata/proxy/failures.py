"""What can go wrong between the proxy and an engine, and how a client is told."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from http import HTTPStatus

import msgspec


class Role(enum.StrEnum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Kind(enum.StrEnum):
    """Why an attempt failed; the label in metrics."""

    UNREACHABLE = "unreachable"  # no connection: the engine has not seen the request
    BROKEN = "broken"  # the connection broke with the request there: it may be what broke the engine
    STATUS = "status"  # an HTTP error, or an error as the first streamed event
    SILENCE = "silence"  # a deadline
    LOST = "lost"  # the engine missed its health checks meanwhile
    NOBODY = "nobody"  # no engine of the role is ready


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failed exchange. `status` and `answer` are the engine's own, where it gave one."""

    role: Role
    backend: str
    kind: Kind
    text: str
    status: int | None = None
    answer: bytes | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.backend}: {self.text}" if self.backend else f"{self.role}: {self.text}"


class ExchangeFailed(Exception):  # noqa: N818 - named for what happened
    """Carries a Failure; never leaves the proxy."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Refused(Exception):  # noqa: N818 - named for what happened
    """The client's answer is an error: `status`, and `body`, JSON in OpenAI's format."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, body: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param) if body is None else body


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error in OpenAI's format, with vLLM's names."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Error"
    name = "".join(word.capitalize() for word in phrase.replace("-", " ").split())
    error = {
        "message": message,
        "type": name if name.endswith("Error") else f"{name}Error",
        "param": param,
        "code": status,
    }
    return msgspec.json.encode({"error": error})


def error_event(body: bytes) -> bytes:
    """Return the events that end a stream which has failed, as vLLM ends one."""
    return b"data: " + body.replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n"
