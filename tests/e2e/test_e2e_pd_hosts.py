"""Prefill, decode and the proxy on three hosts, started as the page says: exact answers, a link that fails.

One world a transport serves its tests, in the order of this file: each leaves the engines ready and at rest.
What is expected comes from transformers. That reads which move nothing are noticed is shown where they can be
switched off (`test_e2e_pd_libraries.py`); here every byte is counted on the link.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import references
from hosts import DEVICE, Host, Network, why_no_hosts
from models import EXAMPLE_MODELS
from pd_engine import START_DEADLINE_S
from pd_launch import WAIT_S, Api, Pending, asking, prompt, until

from kvstrata.remote.channels import ConnectingChannel, ListeningChannel
from kvstrata.remote.transports.registry import transport_for

pytestmark = [pytest.mark.whole_machine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/serving_pd.md"
ROLES = ("prefill", "decode", "proxy")
LEASE_S = 3.0
NEW_TOKENS = 16
CHUNK = 16  # prefill's tokens in a step: a long prompt takes dozens, time enough to cut the link in between
LONG_TOKENS = 900
LONG, SHORT = (1, 2, 3), (4, 5, 6, 7, 8)
BEGUN_BYTES = (
    1_000_000  # more than any request's text; a transfer of a long prompt moves fifteen times as much
)
TCP_WAITS_S = 16  # TCP's sixth try comes some 14 s after a cut, the seventh some 27 s
MODEL_PATH = EXAMPLE_MODELS / "tiny-dsv32"


@functools.cache
def prompt_of(seed: int) -> tuple[int, ...]:
    return tuple(prompt(seed, LONG_TOKENS if seed in LONG else None))


@functools.cache
def expected() -> dict[int, list[int]]:
    """What transformers answers to every prompt of this file."""
    seeds = LONG + SHORT
    answers = references.greedy(MODEL_PATH, [prompt_of(seed) for seed in seeds], NEW_TOKENS)
    return dict(zip(seeds, answers.tokens, strict=True))


def commands() -> list[tuple[dict[str, str], list[str]]]:
    """The page's three, each with its environment: prefill, decode, proxy."""
    blocks = re.findall(r"```shell\n(.*?)```", PAGE.read_text(), re.S)
    (block,) = (block for block in blocks if "10.0.0.1" in block)
    found = []
    for command in re.split(r"\n(?=\S)", str(block).replace("\\\n", " ").strip()):
        words, environment = shlex.split(command), {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        python, *rest = words
        start = {
            ".venv/bin/python": [sys.executable],
            ".venv/bin/kvstrata": [sys.executable, "-m", "kvstrata"],
        }
        found.append((environment, [*start[python], *rest]))
    return found


def quickened(words: list[str], transport: str) -> list[str]:
    """A command of the page with that transport, deadlines of seconds and small steps."""
    if "--kv-transfer-config" not in words:
        return words
    at = words.index("--kv-transfer-config") + 1
    config = json.loads(words[at])
    config["kv_connector_extra_config"] |= {
        "transfer_backend": transport,
        "remote_lease_s": LEASE_S,
        "remote_wait_s": WAIT_S,
    }
    words[at] = json.dumps(config)
    is_prefill = config["kv_role"] == "kv_producer"
    return [*words, "--block-size", "16", *(("--max-num-batched-tokens", str(CHUNK)) if is_prefill else ())]


def api_at(url: str) -> Api:
    """A server that is asked over a new connection each time: a cut link hides the end of an old one."""
    api = Api(url=url)
    api.client = httpx.Client(
        base_url=url, timeout=WAIT_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
    return api


class World:
    """Three hosts with their servers, as somebody on the proxy's sees them."""

    def __init__(self, transport: str, network: Network) -> None:
        self.transport, self.network = transport, network
        self.api = api_at("http://10.0.0.3:8000")
        self.engines = {
            "prefill": api_at("http://10.0.0.1:8100"),
            "decode": api_at("http://10.0.0.2:8200"),
        }

    @property
    def prefill(self) -> Host:
        return self.network["prefill"]

    def count(self, name: str, role: str = "decode") -> float:
        return self.engines[role].metric(f"vllm:kvstrata_remote_{name}")

    def tokens(self, seed: int, api: Api | None = None) -> list[int]:
        answer = (api or self.api).answer(asking(prompt_of(seed), NEW_TOKENS))
        return list(answer["choices"][0]["token_ids"])

    def is_at_rest(self, role: str) -> bool:
        """Whether that engine has no request, no hold, no transfer and nothing in quarantine."""
        gauges = ["num_requests_running", "num_requests_waiting"]
        gauges += [f"kvstrata_remote_{kind}" for kind in ("open_sends", "open_pulls", "quarantined_blocks")]
        return sum(self.engines[role].metric(f"vllm:{gauge}") for gauge in gauges) == 0

    def wait_at_rest(self) -> None:
        for role in self.engines:
            until(lambda role=role: self.is_at_rest(role), f"{role} at rest")
        until(self.is_whole, "an idle proxy with both engines in")

    def is_whole(self) -> bool:
        backends = self.api.client.get("/health").json()["backends"]
        is_idle = all(backend["in"] and backend["requests"] == 0 for backend in backends)
        return is_idle and self.api.metric("kvstrata_proxy_transfers_open") == 0

    @contextmanager
    def cut_in_mid_transfer(self, seed: int) -> Iterator[Pending]:
        """Ask, and cut prefill's link while parts are read; the link is mended when the block ends."""
        begun = self.prefill.sent_bytes() + BEGUN_BYTES
        with Pending(self.api, asking(prompt_of(seed), NEW_TOKENS)) as pending:
            until(lambda: self.prefill.sent_bytes() > begun, "the first parts")
            self.prefill.cut()
            try:
                yield pending
            finally:
                self.prefill.mend()

    def check_next(self, seed: int) -> None:
        """Another prompt is read out of prefill, as if nothing had been."""
        done = self.count("done_pulls_total")
        assert self.tokens(seed) == expected()[seed]
        until(lambda: self.count("done_pulls_total") == done + 1, "a pull")


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The page's commands, each in a host of its own, and this thread in the proxy's."""
    transport = request.param
    reason = why_no_hosts() or transport_for(transport).usable()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp(f"hosts-{transport}")
    common = {
        "KVSTRATA_REMOTE_SECRET": "of-three-hosts-and-of-nobody-else",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # As across machines: hosts here share a kernel, and UCX would see that.
        **({"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE} if transport == "nixl" else {}),
    }
    cores = {"prefill": {"VLLM_CPU_OMP_THREADS_BIND": "0"}, "decode": {"VLLM_CPU_OMP_THREADS_BIND": "1"}}
    with ExitStack() as stack:
        network = stack.enter_context(Network(*ROLES))
        servers = {}
        for role, (environment, words) in zip(ROLES, commands(), strict=True):
            log = directory / f"{role}.log"
            given = {**common, **environment, **cores.get(role, {})}
            command = quickened(words, transport)
            servers[log] = stack.enter_context(
                network[role].serving(command, log, cwd=ROOT, environment=given)
            )
        stack.enter_context(network["proxy"].entered())
        found = World(transport, network)
        expected()  # takes as long as the start of the engines

        def is_started() -> bool:
            for log, server in servers.items():
                assert server.poll() is None, f"{log.name}\n{log.read_text()[-4000:]}"
            return found.api.is_healthy()

        until(is_started, "start of all three hosts", START_DEADLINE_S)
        yield found


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> None:
    """Every test of a world begins with engines that are ready and idle."""
    if "world" in request.fixturenames:
        request.getfixturevalue("world").wait_at_rest()


def test_a_peer_is_heard_as_soon_as_its_link_is_back() -> None:
    """And not when TCP tries again, which after an absence of hours is minutes later."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with Network("prefill", "decode") as network, ExitStack() as stack:
        decode, prefill = network["decode"], network["prefill"]
        with decode.entered():
            listening = ListeningChannel(host=decode.address, port=8300)
        stack.callback(listening.close)
        stack.enter_context(prefill.entered())  # to stay: sockets and their threads are made when first used
        connecting = ConnectingChannel(keep_s=0.5, clock=time.monotonic)
        stack.callback(connecting.close)
        wake_fd = os.eventfd(0)
        stack.callback(os.close, wake_fd)
        peer, said_s = f"{decode.address}:8300", 0.0

        def is_answered() -> bool:
            """Say something twice a second, have decode answer, and tell whether an answer has come."""
            nonlocal said_s
            if time.monotonic() > said_s + 0.5:
                said_s = time.monotonic()
                connecting.send(peer, [b"word"])
            listening.wait(0.01, wake_fd)
            while (received := listening.receive()) is not None:
                listening.send(*received)
            connecting.flush()
            connecting.wait(0.01, wake_fd)
            return connecting.receive() is not None

        until(is_answered, "the first answer")
        prefill.cut()
        mended_s = time.monotonic() + TCP_WAITS_S
        until(lambda: not is_answered() and time.monotonic() > mended_s, "the end of the cut")
        connecting.doubt(peer, LEASE_S)  # as the endpoint does when a transfer has lapsed
        prefill.mend()
        mended_s = time.monotonic()
        until(is_answered, "an answer over the mended link")
        assert time.monotonic() - mended_s < TCP_WAITS_S / 2


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse")
def test_three_hosts_answer_as_one_engine_and_every_byte_crosses_the_link(world: World) -> None:
    seeds = (LONG[0], *SHORT[:2])
    prefill, decode = world.prefill, world.network["decode"]
    before = prefill.sent_bytes(), decode.received_bytes()
    done, pulled = world.count("done_pulls_total"), world.count("pulled_bytes_total")
    with ThreadPoolExecutor(len(seeds)) as pool:
        answers = list(pool.map(world.tokens, seeds))
    assert answers == [expected()[seed] for seed in seeds]
    until(lambda: world.count("done_pulls_total") == done + len(seeds), "all pulls")
    until(lambda: world.count("done_sends_total", "prefill") >= len(seeds), "as many sends")
    pulled = world.count("pulled_bytes_total") - pulled
    assert pulled > BEGUN_BYTES
    assert prefill.sent_bytes() - before[0] > pulled
    assert decode.received_bytes() - before[1] > pulled


def test_nobody_listens_but_on_the_addresses_that_the_commands_name(world: World) -> None:
    # Over a library prefill has one port more: the page that says where the library serves now.
    for_data = {"tcp": {"prefill": 1}, "nixl": {"prefill": 2, "decode": 1}}[world.transport]
    for role, ports in (("prefill", {8100}), ("decode", {8200, 8300}), ("proxy", {8000})):
        host = world.network[role]
        listening = host.listening()
        assert {address for address, _ in listening} <= {host.address, "127.0.0.1"}, (role, listening)
        reachable = {port for address, port in listening if address == host.address}
        assert ports <= reachable
        assert len(reachable - ports) <= for_data.get(role, 0), (role, reachable)


def test_a_link_that_is_away_for_less_than_a_lease_costs_time_only(world: World) -> None:
    seed = LONG[1]
    with world.cut_in_mid_transfer(seed) as pending:
        away_until = time.monotonic() + LEASE_S / 3
        until(lambda: time.monotonic() > away_until, "a third of a lease")
    assert pending.answer()["choices"][0]["token_ids"] == expected()[seed]
    world.wait_at_rest()
    world.check_next(SHORT[2])


def test_a_link_that_is_away_for_longer_is_not_waited_for_and_is_used_again(world: World) -> None:
    seed, done = LONG[2], world.count("done_pulls_total")
    with world.cut_in_mid_transfer(seed) as pending:
        # Requests beside it do not notice, whoever they are sent to.
        assert world.tokens(SHORT[3], world.engines["decode"]) == expected()[SHORT[3]]
        assert pending.answer()["choices"][0]["token_ids"] == expected()[seed]
        until(lambda: world.is_at_rest("decode"), "decode at rest, with the link still away")
        assert world.count("done_pulls_total") == done
    world.wait_at_rest()
    world.check_next(SHORT[4])
