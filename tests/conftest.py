"""Tests of processes under leases and deadlines of a second get a second chance, counted in the summary.

They wait for real sockets and real clocks, and a machine that stalls for a second breaks what they assume.
What must hold whatever the timing is shown on a virtual clock, where nothing is repeated (tests/property).
"""

from __future__ import annotations

import pytest

TIMED = (
    "unit/test_proxy_",
    "unit/test_remote_endpoint",
    "unit/test_remote_loop",
    "unit/test_remote_metaserver",
    "unit/test_remote_read_pool",
    "unit/test_serve_pd_",
    "unit/test_transport_",
    "conformance/test_owner_carriers",
    "conformance/test_remote_processes",
    "conformance/test_transport_owners",
    "conformance/test_store_",
    "conformance/test_transports",
    "e2e/test_e2e_kvpp",
    "e2e/test_e2e_pd",
    "e2e/test_e2e_replicas",
    "e2e/test_e2e_together",
)

POOLS = ("conformance/test_store_",)
"""Native libraries that no other test shall share a process with."""

EXTENDED = (
    "conformance/test_store_pool_faults",
    "conformance/test_store_pool_leases",
    "conformance/test_transport_owners",
)
"""Servers and owners of other projects' libraries killed, stopped and restarted: only in `make test-all`."""

ENDS_ITS_WORLD = ("test_an_interrupt_leaves_no_process_no_memory_and_no_port",)
"""A second chance would find nothing left to interrupt."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.path.as_posix() for name in TIMED):
            item.add_marker(pytest.mark.timed)
            if any(name in item.path.as_posix() for name in POOLS):
                item.add_marker(pytest.mark.pools)
            if any(name in item.path.as_posix() for name in EXTENDED):
                item.add_marker(pytest.mark.extended)
            if item.name not in ENDS_ITS_WORLD:
                item.add_marker(pytest.mark.flaky(reruns=1))
