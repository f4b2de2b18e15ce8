"""What an endpoint of remote read is told: checked when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from remote_sides import (
    Make,
    maker,
)

from kvstrata.errors import ConfigurationError
from kvstrata.remote.consumer.endpoint import ConsumerEndpoint
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, quick_options


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(stack)


def test_a_taken_port_and_no_transport_are_errors_of_configuration(make: Make) -> None:
    consumer = make(ConsumerSide)
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{consumer.address()[1]}"):
        make(ConsumerSide, port=consumer.address()[1])
    for side in (ProducerSide, ConsumerSide):
        with pytest.raises(ConfigurationError, match="at least one transport"):
            make(side, transports=[])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": ""}, "host is empty"),
        ({"secret": b""}, "secret is empty"),
        ({"lease_s": 0.0}, "lease_s=0.0"),
        ({"wait_s": float("nan")}, "wait_s=nan"),
        ({"resend_s": 0.6}, "resend_s=0.6 must be at most half of lease_s=1"),
        ({"read_attempts": 0}, "read_attempts=0"),
        ({"readers": 65}, "readers=65"),
        ({"memfabric_protocol": "tcp"}, "memfabric_protocol='tcp'"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quick_options(**changes)


def test_options_do_not_show_the_secret() -> None:
    assert "hidden" not in repr(EndpointOptions(host="127.0.0.1", secret=b"hidden"))


def test_an_endpoint_of_decode_checks_its_own_ranks(make: Make) -> None:
    with pytest.raises(AssertionError):
        make(ConsumerSide, main_rank=1, main_ranks=1)
    assert ConsumerEndpoint.__doc__
