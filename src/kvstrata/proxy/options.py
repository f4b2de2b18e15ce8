"""What the proxy is told, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvstrata.errors import ConfigurationError

METASERVER_PATH = "/v1/metaserver"


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Engines, deadlines and bounds. Raises ConfigurationError with the option, its value and the fix."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    secret: bytes = field(repr=False)
    metaserver_url: str  # where decode engines post their adverts, as they can reach it
    deadline_s: float = 600.0  # longest silence of a stream: to the first token, and between two
    answer_deadline_s: float = 3600.0  # for a whole answer that is not streamed, prefill's included
    connect_deadline_s: float = 5.0
    health_interval_s: float = 2.0
    health_deadline_s: float = 5.0
    misses_until_out: int = 2  # health checks without an answer; a refusal counts at once
    misses_until_lost: int = 4  # then requests that wait for the engine are given up too
    most_attempts: int = 4  # per prompt; the last one computes the prompt at decode
    most_children: int = 512  # prompts of a request, times n
    max_body_bytes: int = 32 << 20
    body_deadline_s: float = 60.0
    max_event_bytes: int = 8 << 20  # of one streamed event
    max_answer_bytes: int = 256 << 20  # of an answer that is not streamed

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigurationError("--decode is missing: the proxy needs at least one decode engine")
        for option, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            for url in urls:
                check_url(option, url)
            if len({url.rstrip("/") for url in urls}) != len(urls):
                raise ConfigurationError(f"{option}={' '.join(urls)}: an engine is named twice; name it once")
        check_url("--metaserver-url", self.metaserver_url)
        for name in ("deadline_s", "answer_deadline_s", "connect_deadline_s", "health_interval_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                option = "--" + name.removesuffix("_s").replace("_", "-")
                raise ConfigurationError(f"{option}={value}: set a number of seconds above 0")
        if not self.secret:
            raise ConfigurationError("--secret is empty; set the secret that the engines have")
        assert 1 <= self.misses_until_out <= self.misses_until_lost
        assert self.most_attempts >= 1


def check_url(option: str, url: str) -> None:
    """Raise ConfigurationError unless `url` is http(s)://host[:port][/path]."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_good = False
    if not is_good or parts.query or parts.fragment:
        raise ConfigurationError(f"{option}={url}: not a URL; write http://host:port")
