"""Fixtures of the tests of transports: one member after the other, producers in their own processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from store_pools import Pool, running
from transport_cases import (
    BIG,
    BIG_BYTES,
    FAMILIES,
    FAR,
    FAR_BYTES,
    KIB,
    MIB,
    REGIONS,
    SECRET,
    Family,
    environment_of,
)

from kvstrata.remote.holds import Hold
from kvstrata.remote.transports.base import Reader
from kvstrata.remote.transports.testing import Memory, ProducerProcess

STATUS = pytest.StashKey[int]()


@pytest.fixture(params=FAMILIES, scope="session")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    with environment_of(request.param, tmp_path_factory.mktemp("member")):
        family = FAMILIES[request.param]()
        reason = family.transport.usable()
        if reason is not None:
            pytest.skip(reason)
        yield family


@pytest.fixture(scope="session")
def session_producer(family: Family) -> Iterator[ProducerProcess]:
    with ProducerProcess(family.inner, REGIONS, secret=SECRET) as made:
        made.fill(0, 0, REGIONS[0], salt=1)
        made.fill(1, 0, REGIONS[1], salt=1)
        made.fill(2, FAR, FAR_BYTES, salt=1)
        made.fill(BIG, 0, BIG_BYTES, salt=1)
        yield made


@pytest.fixture
def producer(session_producer: ProducerProcess) -> ProducerProcess:
    """One a member, for the tests that leave it as it was."""
    return session_producer


@pytest.fixture
def own_producer(family: Family) -> Iterator[ProducerProcess]:
    """One for the tests that end it."""
    with ProducerProcess(family.inner, (*[4 * KIB] * BIG, BIG_BYTES), secret=SECRET) as made:
        made.fill(BIG, 0, BIG_BYTES, salt=1)
        yield made


@pytest.fixture
def hold(producer: ProducerProcess) -> Iterator[Hold]:
    hold = producer.grant()
    yield hold
    producer.revoke(hold)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(4 * MIB)
    yield memory
    memory.check()


@pytest.fixture
def reader(family: Family, producer: ProducerProcess, memory: Memory) -> Iterator[Reader]:
    reader = family.connect(producer.ticket, memory)
    yield reader
    reader.close()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without what MemCache's library does at the end of a process that has lost its servers: crash."""
    if "memcache_hybrid" in sys.modules and config.stash.get(STATUS, None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[STATUS])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.fixture(scope="module")
def mooncake_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running("mooncake", tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool


@pytest.fixture(scope="module")  # one MetaService a machine: tests of faults have their own
def memcache_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running("memcache", tmp_path_factory.mktemp("memcache")) as pool:
        yield pool
