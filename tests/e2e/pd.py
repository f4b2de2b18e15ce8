"""A prefill engine, a decode engine and what stands for the proxy between them.

The metaserver here takes decode's advert over HTTP, as the proxy's does, and hands the prompt to prefill.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engines import BLOCK_SIZE, engine_arguments
from models import Model
from pd_engine import PdEngine

LEASE_S = 3.0
WAIT_S = 60.0  # until decode stops waiting for prefill to begin
# What a peer's death or silence may take to be over everywhere, on a machine that has other work too.
AT_REST_DEADLINE_S = 10 * LEASE_S


def free_port(count: int = 1) -> int:
    """Return the first of `count` free ports in a row."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def remote(role: str, port: int = 1, **extra: Any) -> dict[str, Any]:
    """Engine arguments of one end of remote read; `extra` goes to kv_connector_extra_config.

    Only a consumer listens on its port; a producer's switches remote read on.
    """
    return {
        "kv_transfer_config": {
            "kv_connector": "KVStrataConnector",
            "kv_role": f"kv_{role}",
            "kv_connector_extra_config": {
                "backend": "none",
                "kv_port": port,
                "remote_lease_s": LEASE_S,
                "remote_wait_s": WAIT_S,
                **extra,
            },
        }
    }


Answer = Callable[[dict[str, Any]], int | None]
"""What the metaserver says to an advert: an HTTP status, or None to hand the prompt to prefill."""


@dataclass
class _Request:
    prompt: list[int]
    prefill: PdEngine
    answer: Answer | None


class Pair:
    """Asks prompts of a decode engine whose prompts a prefill engine computes. Either may be replaced."""

    def __init__(self, prefill: PdEngine, decode: PdEngine) -> None:
        self.prefill, self.decode = prefill, decode
        self.adverts: list[dict[str, Any]] = []
        self._requests: dict[str, _Request] = {}
        self._count = 0
        pair = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                advert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = pair._take(advert)
                with contextlib.suppress(OSError):  # decode may have hung up
                    self.send_response(status)
                    self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/metaserver"

    def submit(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        prefill: PdEngine | None = None,
        answer: Answer | None = None,
    ) -> str:
        """Start one request; returns its name on the decode engine. Prefill's is the same."""
        self._count += 1
        name = f"pd-{id(self)}-{self._count}"
        self._requests[name] = _Request(list(prompt), prefill or self.prefill, answer)
        params = {"do_remote_prefill": True, "transfer_id": name, "metaserver": self.url}
        self.decode.add(name, prompt, new_tokens, params)
        return name

    def submit_local(self, prompt: Sequence[int], new_tokens: int) -> str:
        """Start one request that decode computes alone."""
        self._count += 1
        name = f"local-{id(self)}-{self._count}"
        self.decode.add(name, prompt, new_tokens, None)
        return name

    def tokens(self, name: str) -> list[int]:
        """The answer to a request, once it is there."""
        return list(self.decode.answer(name)["tokens"])

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Answers to all prompts at once, in prompt order."""
        return [self.tokens(name) for name in [self.submit(prompt, new_tokens) for prompt in prompts]]

    def forget_prefixes(self) -> None:
        """Empty both engines' own prefix caches, which takes engines at rest."""
        for engine in (self.prefill, self.decode):
            wait_for(lambda engine=engine: engine.call("forget_prefixes"), f"{engine.name} at rest")

    def send_to_prefill(self, advert: dict[str, Any]) -> None:
        """What the proxy does with an advert."""
        name = advert["transfer_id"]
        request = self._requests[name]
        where = {key: advert[key] for key in ("host", "kv_port", "tp_size", "dp_rank", "first_block")}
        params = {"do_remote_decode": True, "transfer_id": name, "remote": where}
        request.prefill.add(name, request.prompt, 1, params)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, advert: dict[str, Any]) -> int:
        request = self._requests.get(advert["transfer_id"])
        if request is None:
            return 404
        self.adverts.append(advert)
        status = request.answer(advert) if request.answer is not None else None
        if status is not None:
            return status
        self.send_to_prefill(advert)
        return 200


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = AT_REST_DEADLINE_S) -> Any:
    """Poll other processes until `condition` holds and return its value; a failure says `what` did not."""
    ends_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < ends_s, f"{what}: not within {deadline_s} s"
        time.sleep(0.02)
    return value


_AT_REST = ("sends_open", "pulls_open", "quarantined_blocks")


def assert_at_rest(*engines: PdEngine, deadline_s: float = AT_REST_DEADLINE_S) -> None:
    """Soon nothing of any transfer is left: no lease, no quarantine, no block; and all parts agree."""
    for engine in engines:
        left: dict[str, Any] = {}

        def is_at_rest(engine: PdEngine = engine, left: dict[str, Any] = left) -> bool:
            statistics = engine.statistics()
            left.update({key: statistics[key] for key in _AT_REST})
            left["held blocks"] = engine.free_at_start - engine.call("free_blocks")
            return not any(left.values())

        try:
            wait_for(is_at_rest, f"rest of the {engine.name} engine", deadline_s)
        except AssertionError as trouble:
            raise AssertionError(f"{trouble}; left: {left}\n{engine.log()[-4000:]}") from None
        engine.call("check_integrity")


def advertised_blocks(adverts: Sequence[dict[str, Any]]) -> int:
    """Blocks that decode asked for."""
    return sum(-(-advert["num_tokens"] // BLOCK_SIZE) - advert["first_block"] for advert in adverts)


class Fleet:
    """Engines of one model, and the pair of those that answer; all end with the block."""

    def __init__(self, model: Model, directory: Path) -> None:
        self.model = model
        self._directory = directory
        self._started: list[PdEngine] = []
        self._pairs: list[Pair] = []

    def start(self, *given: tuple[str, dict[str, Any], str]) -> list[PdEngine]:
        """Start engines at the same time: name, arguments, CPUs. Returns once all of them answer."""
        return self.start_given(
            *((name, engine_arguments(self.model, **arguments), cpus) for name, arguments, cpus in given)
        )

    def start_given(self, *given: tuple[str, dict[str, Any], str]) -> list[PdEngine]:
        """As `start`, with all the arguments that an engine takes."""
        engines = []
        for name, arguments, cpus in given:
            log = self._directory / f"{len(self._started)}-{name}.log"
            engine = PdEngine(name, arguments, cpus=cpus, log=log)
            self._started.append(engine)
            engines.append(engine)
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(PdEngine.wait_until_ready, engines))
        return engines

    def pair(self, prefill: PdEngine, decode: PdEngine) -> Pair:
        self._pairs.append(Pair(prefill, decode))
        return self._pairs[-1]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        for pair in self._pairs:
            pair.close()
        for engine in self._started:
            engine.begin_end()
        with contextlib.ExitStack() as stack:  # all of them, whatever becomes of one
            for engine in self._started:
                stack.callback(engine.close)


@contextlib.contextmanager
def open_pair(
    model: Model,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    *,
    directory: Path,
    bind: tuple[str, str] = ("0", "1"),
) -> Iterator[Pair]:
    """Run the block with both engines; they start at the same time, each on a core of its own."""
    with Fleet(model, directory) as fleet:
        yield fleet.pair(*fleet.start(("prefill", prefill, bind[0]), ("decode", decode, bind[1])))
