"""The simulated proxy and its clients: decode first, prefill on decode's advert, again when prefill fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.sim.decode import Decode
from kvstrata.sim.http import Call
from kvstrata.sim.options import Request
from kvstrata.sim.prefill import Prefill
from kvstrata.sim.setting import Setting
from kvstrata.sim.world import Violation

_BACK_OFF_S = 0.3
_DECODE_ATTEMPTS = 12
"""Enough to outlive every restart."""


@dataclass(slots=True, eq=False)
class Client:
    """One request as the proxy sees it. Ends once, with `answered`, `aborted` or `failed`."""

    request: Request
    ended: str = ""
    attempt: int = 0
    transfer: str = ""
    number: int = 0
    has_streamed: bool = False
    has_seen_crash: bool = False
    decode: Call | None = None
    prefill: Call | None = None
    adverts: int = 0


class Proxy:
    """Assigns transfer ids, each used once."""

    def __init__(self, setting: Setting, prefill: Prefill, decode: Decode) -> None:
        self._setting = setting
        self._world = setting.world
        self._prefill = prefill
        self._decode = decode
        self._calls = 0
        self._transfers = 0
        self.clients = [Client(request) for request in setting.options.requests]
        for client in self.clients:
            request = client.request
            self._world.at(request.starts_s, self._attempt, client)
            if request.gives_up_s is not None:
                self._world.at(request.starts_s + request.gives_up_s, self._give_up, client)

    @property
    def is_idle(self) -> bool:
        """Whether every client has its answer, or has left."""
        return all(client.ended for client in self.clients)

    def _attempt(self, client: Client) -> None:
        if client.ended or client.decode is not None:
            return
        client.attempt += 1
        self._transfers += 1
        client.number = self._transfers
        client.transfer = f"t{client.number}"
        client.adverts = 0
        is_remote = client.attempt <= 1 + self._setting.options.retries
        self._world.note("proxy", "sends", client.request.number, client.transfer, is_remote)

        def advertised(transfer: str, first_block: int) -> None:
            self._advertised(client, transfer, first_block)

        def streamed(call: Call) -> None:
            client.has_streamed |= call is client.decode

        client.decode = self._call(
            lambda call, _: self._end(client, "answered"), lambda call: self._decode_failed(client)
        )
        self._decode.post(
            client.decode,
            self._decode.generate,
            client.request,
            client.transfer,
            client.number,
            is_remote,
            advertised,
            streamed,
        )

    def _advertised(self, client: Client, transfer: str, first_block: int) -> None:
        if client.ended or transfer != client.transfer or client.adverts:
            self._world.counts["adverts refused"] += 1  # unknown, or seen already
            return
        client.adverts += 1
        client.prefill = self._call(
            lambda call, is_good: self._prefilled(client, is_good),
            lambda call: self._prefilled(client, False),
        )
        self._prefill.post(
            client.prefill, self._prefill.prefill, client.request, transfer, client.number, first_block
        )

    def _prefilled(self, client: Client, is_good: bool) -> None:
        client.prefill = None
        if is_good or client.ended or client.has_streamed or not self._setting.options.retries_prefill:
            return
        self._world.counts["proxy retries"] += 1
        self._hang_up(client)
        self._attempt(client)

    def _decode_failed(self, client: Client) -> None:
        client.decode = None
        client.has_seen_crash = True
        self._hang_up(client)
        if client.has_streamed or client.attempt >= _DECODE_ATTEMPTS:
            self._end(client, "failed")
        else:
            self._world.at(_BACK_OFF_S * (1 + self._world.random.random()), self._attempt, client)

    def _give_up(self, client: Client) -> None:
        if not client.ended:
            self._hang_up(client)
            self._end(client, "aborted")

    def _hang_up(self, client: Client) -> None:
        if client.decode is not None:
            self._decode.post_cancel(client.decode)
            client.decode = None
        if client.prefill is not None:
            self._prefill.post_cancel(client.prefill)
            client.prefill = None

    def _end(self, client: Client, how: str) -> None:
        if client.ended:
            raise Violation(
                "exactly once", f"request {client.request.number} ends {how} after {client.ended}"
            )
        if how == "failed" and not client.has_seen_crash:
            raise Violation("no reason", f"request {client.request.number} fails without a crash of decode")
        client.ended = how
        client.decode = None
        self._hang_up(client)  # prefill may still be at it
        self._world.counts[f"requests {how}"] += 1
        self._world.note("proxy", "ends", client.request.number, how)
        self._world.release()

    def _call(self, on_answer: Any, on_error: Any) -> Call:
        self._calls += 1
        return Call(self._calls, on_answer, on_error)
