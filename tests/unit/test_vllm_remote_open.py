"""What the knobs make of an endpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvstrata.config import parse_connector_config
from kvstrata.errors import LayoutError
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion
from kvstrata.vllm.remote_open import endpoint_options, place_in

GIVEN = {"kv_port": 4000, "remote_secret": "a-long-secret"}


def test_knobs_arrive_at_the_endpoint():
    options = endpoint_options(
        parse_connector_config(
            {**GIVEN, "remote_lease_s": 4.0, "remote_wait_s": 9.0, "remote_read_attempts": 5}
        )
    )
    assert (options.host, options.secret) == ("127.0.0.1", b"a-long-secret")
    assert (options.lease_s, options.wait_s, options.read_attempts) == (4.0, 9.0, 5)


@pytest.mark.parametrize(("wait_s", "open_wait_s"), [(9.0, 9.0), (300.0, 60.0)])
def test_prefill_offers_no_longer_than_decode_waits(wait_s, open_wait_s):
    options = endpoint_options(parse_connector_config({**GIVEN, "remote_wait_s": wait_s}))
    assert options.open_wait_s == open_wait_s


@pytest.mark.parametrize("lease_s", [0.1, 1.0, 60.0])
def test_a_lost_message_is_repeated_well_within_the_lease(lease_s):
    options = endpoint_options(parse_connector_config({**GIVEN, "remote_lease_s": lease_s}))
    assert options.resend_s <= lease_s / 4


def region(address: int, size_bytes: int) -> HostRegion:
    return cast(HostRegion, SimpleNamespace(address=address, size_bytes=size_bytes))


def pages(address: int) -> PageView:
    return PageView(address=address, block_stride_bytes=128, page_bytes=64, num_blocks=3)  # 320 bytes


def test_pages_are_placed_in_the_region_that_holds_them_all():
    regions = [region(4096, 1000), region(8192, 1000)]
    place = place_in(regions, pages(8192 + 680))
    assert (place.region, place.offset, place.block_stride_bytes, place.num_blocks) == (1, 680, 128, 3)
    assert place_in(regions, pages(4096)).offset == 0


@pytest.mark.parametrize("address", [4095, 4096 + 681, 8191, 1 << 40])
def test_pages_that_are_not_all_in_one_region_are_refused(address: int):
    with pytest.raises(LayoutError, match="in none of 2 shared regions"):
        place_in([region(4096, 1000), region(8192, 1000)], pages(address))
