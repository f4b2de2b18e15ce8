"""What to try next for one prompt: the retry policy, without any IO.

    what failed                               what the next attempt does differently
    prefill, whatever the reason              another prefill engine, a new transfer
    prefill, none left or none ready          decode computes the prompt itself
    decode: unreachable, broken, lost         another decode engine
    decode: 5xx while prefill took part       another one if there is one, and it computes the prompt itself
    decode: 5xx while it computed itself      another decode engine
    decode: 4xx                               nothing: the client is told what decode said
    decode: silent until the deadline         nothing: the client has waited long enough
    anything after the first token            nothing: what was streamed cannot be taken back
    two engines broken by this prompt         nothing, or for prefill: decode computes the prompt itself
The last of `most` attempts never asks prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstrata.proxy.failures import Failure, Kind, Refused, Role

_MOST_BROKEN = 2  # a request that ends engines must not be carried from one to the next

Choose = Callable[[Role, Collection[str]], str | None]
WhyNone = Callable[[Role], str]


@dataclass(frozen=True)
class Plan:
    """One attempt: which decode engine, and whether prefill may compute the prompt for it."""

    number: int  # from 1
    decode: str
    is_remote: bool


class Attempts:
    """The attempts for one prompt; `next` and `failed` alternate."""

    def __init__(self, *, most: int, wants_remote: bool, choose: Choose, why_none: WhyNone) -> None:
        """`choose(role, avoid)` returns the URL of a ready engine, None if there is none.

        `why_none(role)` says why no engine of the role is ready.
        """
        self._most, self._choose, self._why_none = most, choose, why_none
        self._wants_remote = wants_remote
        self._plan: Plan | None = None
        self._failures: list[Failure] = []
        self._failed_prefill: set[str] = set()
        self._failed_decode: set[str] = set()
        self._disliked_decode: set[str] = set()  # failed, but maybe for prefill's sake
        self._is_over = False
        self._has_spoken = False

    @property
    def has_spoken(self) -> bool:
        """Whether the client has been sent something of the answer."""
        return self._has_spoken

    def speak(self) -> None:
        """Say that the client is being sent the answer: there is no going back."""
        self._has_spoken = True

    def next(self) -> Plan:
        """Return the next attempt. Raises Refused when there is none, with every reason."""
        tried = len(self._failures)
        if self._is_over or tried >= self._most:
            raise self._refusal(f"gave up after {tried} attempt{'s' * (tried > 1)}")
        decode = self._choose(Role.DECODE, self._failed_decode | self._disliked_decode)
        if decode is None:
            decode = self._choose(Role.DECODE, self._failed_decode)
        if decode is None:
            raise self._refusal("no decode engine is ready")
        may_ask_prefill = self._wants_remote and (tried == 0 or tried + 1 < self._most)
        is_remote = may_ask_prefill and self.prefiller() is not None
        self._plan = Plan(tried + 1, decode, is_remote)
        return self._plan

    def prefiller(self) -> str | None:
        """Return the prefill engine to ask now; None if none is left."""
        return self._choose(Role.PREFILL, self._failed_prefill)

    def failed(self, failure: Failure) -> None:
        """Take note of why the attempt that `next` returned has failed."""
        assert self._plan is not None
        self._failures.append(failure)
        self._is_over = self._is_over or self._has_spoken
        broken = sum(past.kind is Kind.BROKEN for past in self._failures)
        is_dangerous = failure.kind is Kind.BROKEN and broken >= _MOST_BROKEN
        if failure.role is Role.PREFILL:
            if failure.kind is Kind.NOBODY or is_dangerous:
                self._wants_remote = False
            else:
                self._failed_prefill.add(failure.backend)
        elif (
            is_dangerous
            or failure.kind is Kind.SILENCE
            or (failure.status is not None and failure.status < 500)
        ):
            self._is_over = True
        elif failure.kind is Kind.STATUS and self._plan.is_remote:
            self._disliked_decode.add(failure.backend)
            self._wants_remote = False
        else:
            self._failed_decode.add(failure.backend)

    def _refusal(self, why: str) -> Refused:
        if not self._failures:
            return Refused(503, f"{why}: {self._why_none(Role.DECODE)}")
        last = self._failures[-1]
        if last.role is Role.DECODE and last.status is not None:
            return Refused(last.status, str(last), body=last.answer)
        status = 504 if last.kind is Kind.SILENCE else 502 if self._has_spoken else 503
        return Refused(status, f"{why}: " + "; ".join(map(str, self._failures)))
