"""Where decode engines post their adverts, and the requests that wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from kvstrata.remote.metaserver import Advert, decode_advert, is_authorized


@dataclass(frozen=True, kw_only=True)
class MetaserverAnswer:
    """What the poster is answered; `outcome` is the label in metrics."""

    status: int
    outcome: str
    message: str


class Metaserver:
    """Transfers that an advert may come for. Used from the event loop's thread only."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._expected: dict[str, asyncio.Future[Advert]] = {}
        self.outcomes: Counter[str] = Counter()

    def expect(self, transfer: str) -> asyncio.Future[Advert]:
        """Accept an advert for a new transfer until `forget`; the future is done when it came."""
        assert transfer not in self._expected, transfer
        future: asyncio.Future[Advert] = asyncio.get_running_loop().create_future()
        self._expected[transfer] = future
        return future

    def forget(self, transfer: str) -> None:
        """Take no advert for the transfer any more; no-op for an unknown one."""
        future = self._expected.pop(transfer, None)
        if future is not None:
            future.cancel()

    def post(self, body: bytes, authorization: str) -> MetaserverAnswer:
        """Take an advert; never raises."""
        answer = self._answer(body, authorization)
        self.outcomes[answer.outcome] += 1
        return answer

    def open(self) -> int:
        """Return how many transfers are known."""
        return len(self._expected)

    def _answer(self, body: bytes, authorization: str) -> MetaserverAnswer:
        # Before the body is looked at: a stranger learns nothing and makes nothing happen.
        if not is_authorized(self._secret, body, authorization):
            message = "wrong or missing signature; give the engines and the proxy the same secret"
            return MetaserverAnswer(status=401, outcome="unauthorized", message=message)
        try:
            advert = decode_advert(body)
        except ValueError as error:
            return MetaserverAnswer(status=400, outcome="malformed", message=f"not an advert: {error}")
        future = self._expected.get(advert.transfer_id)
        if future is None:
            message = f"transfer {advert.transfer_id!r} is unknown, or over"
            return MetaserverAnswer(status=404, outcome="unknown", message=message)
        if future.done():
            message = f"transfer {advert.transfer_id!r} has been advertised before"
            return MetaserverAnswer(status=409, outcome="repeated", message=message)
        future.set_result(advert)
        return MetaserverAnswer(status=200, outcome="ok", message="ok")
