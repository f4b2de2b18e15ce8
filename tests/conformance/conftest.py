"""Fixtures of the tests of transports: one member after the other, producers in their own processes."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def mooncake_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running("mooncake", tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool


@pytest.fixture(scope="module")  # one MetaService a machine: tests of faults have their own
def memcache_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running("memcache", tmp_path_factory.mktemp("memcache")) as pool:
        yield pool
