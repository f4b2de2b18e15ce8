"""What must agree before KV is read: each mismatch is refused with both sides' values."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import KVStrataError
from kvstrata.remote.protocol.handshake import Mismatch, check_hello, component_layouts
from kvstrata.remote.protocol.messages import MAX_TEXT_CHARS, ComponentLayout, Hello, Place, TransportOffer


def layout(layer: int, component: str = "main", **changed) -> ComponentLayout:
    fields = {"is_draft": layer == 2, "page_bytes": 1024, "block_tokens": 16, "layout": "bf16 576"}
    return ComponentLayout(layer=layer, component=component, **(fields | changed))


LAYOUTS = (layout(0), layout(0, "indexer"), layout(1), layout(2))
PLACE = Place(region=0, offset=0, block_stride_bytes=1024, num_blocks=8)
HELLO = Hello(
    epoch="e",
    version=1,
    rank=3,
    tp_size=8,
    components=LAYOUTS,
    places=(PLACE,) * 4,
    offers=(TransportOffer(name="shm", ticket=b"host-a"), TransportOffer(name="tcp", ticket=b"port")),
    lease_s=10.0,
)


class Reaching:
    """A transport that reaches the tickets it was given."""

    def __init__(self, name: str, *tickets: bytes) -> None:
        self.name = name
        self._tickets = tickets

    def reaches(self, ticket: bytes) -> str | None:
        return None if ticket in self._tickets else f"{ticket!r} is elsewhere"


class Stumbling(Reaching):
    def reaches(self, ticket: bytes) -> str | None:
        raise IndexError("index out of range")


SHM, TCP = Reaching("shm", b"host-a"), Reaching("tcp", b"port")


def check(hello: Hello = HELLO, **changed) -> str:
    options = {
        "components": LAYOUTS,
        "tp_rank": 1,
        "tp_size": 4,
        "transports": [SHM, TCP],
        "memfabric_protocol": "sdma",
    }
    return check_hello(hello, **(options | changed))


def refused(hello: Hello = HELLO, **changed) -> str:
    with pytest.raises(Mismatch) as mismatch:
        check(hello, **changed)
    assert isinstance(mismatch.value, KVStrataError)
    assert str(mismatch.value) == mismatch.value.reason
    assert len(mismatch.value.reason) <= MAX_TEXT_CHARS
    return mismatch.value.reason


def hello(**changed) -> Hello:
    return msgspec.structs.replace(HELLO, **changed)


def with_layouts(*layouts: ComponentLayout) -> Hello:
    return hello(components=layouts, places=(PLACE,) * len(layouts))


def test_sides_that_agree_use_the_consumers_first_choice() -> None:
    assert check() == "shm"
    assert check(transports=[TCP, SHM]) == "tcp"


def test_a_transport_that_does_not_reach_the_producer_is_passed_over() -> None:
    assert check(transports=[Reaching("shm", b"host-b"), TCP]) == "tcp"
    assert check(transports=[Reaching("nixl"), Stumbling("shm"), TCP]) == "tcp"


def test_no_common_transport_says_what_each_side_has_and_why_not() -> None:
    assert refused(transports=[Reaching("nixl")]) == (
        "no common transport: prefill offers ['shm', 'tcp'], decode has ['nixl']"
    )
    assert "; shm: b'host-a' is elsewhere" in refused(transports=[Reaching("shm")])
    assert "shm: cannot read the ticket (IndexError: 'index out of range')" in refused(
        transports=[Stumbling("shm")]
    )
    assert "prefill offers [], decode has ['shm', 'tcp']" in refused(hello(offers=()))


def test_a_transport_offered_twice() -> None:
    twice = (*HELLO.offers, TransportOffer(name="shm", ticket=b"host-b"))
    assert refused(hello(offers=twice)) == "prefill offers ['shm', 'tcp', 'shm'], one of them twice"


def test_other_protocol_versions() -> None:
    assert refused(hello(version=2)) == "protocol version 2 at prefill, 1 at decode"
    assert refused(version=3) == "protocol version 1 at prefill, 3 at decode"


@pytest.mark.parametrize(("p_tp", "d_tp", "rank"), [(4, 8, 0), (8, 3, 0), (0, 1, 0)])
def test_tensor_parallel_sizes_that_do_not_divide(p_tp: int, d_tp: int, rank: int) -> None:
    reason = refused(hello(tp_size=p_tp, rank=rank), tp_size=d_tp, tp_rank=0)
    assert f"tensor_parallel_size={p_tp} " in reason
    assert f"tensor_parallel_size={d_tp}:" in reason


def test_a_rank_outside_its_engine() -> None:
    assert refused(hello(rank=8)) == "prefill rank 8 is outside 0..7"


def test_a_rank_that_spoke_to_another_decode_rank() -> None:
    assert refused(tp_rank=2) == "prefill rank 3 of 8 belongs to decode rank 1 of 4, but spoke to rank 2"


def test_pipeline_parallelism() -> None:
    assert refused(hello(pp_size=2)) == "pipeline_parallel_size 2 at prefill, 1 at decode"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"page_bytes": 1056}, "layer 1 main: page_bytes 1056 at prefill, 1024 at decode"),
        ({"block_tokens": 32}, "layer 1 main: block_tokens 32 at prefill, 16 at decode"),
        ({"layout": "fp8 528"}, "layer 1 main: layout 'fp8 528' at prefill, 'bf16 576' at decode"),
        ({"is_draft": True}, "layer 1 main: is_draft True at prefill, False at decode"),
    ],
)
def test_a_cache_that_differs(changed: dict, reason: str) -> None:
    theirs = with_layouts(*LAYOUTS[:2], layout(1, **changed), LAYOUTS[3])
    if "page_bytes" in changed:
        theirs = msgspec.structs.replace(
            theirs, places=(msgspec.structs.replace(PLACE, block_stride_bytes=2048),) * 4
        )
    assert refused(theirs) == reason


def test_an_indexer_on_one_side_only() -> None:
    without = (LAYOUTS[0], *LAYOUTS[2:])
    assert refused(with_layouts(*without)) == "layer 0 indexer exists only at decode"
    assert refused(components=without) == "layer 0 indexer exists only at prefill"


def test_draft_layers_on_one_side_only() -> None:
    # Field fault: draft layers forgotten by a loop that ends at the base layer count.
    assert refused(with_layouts(*LAYOUTS[:3])) == "layer 2 main exists only at decode"
    assert refused(components=LAYOUTS[:3]) == "layer 2 main exists only at prefill"


def test_the_order_of_the_caches_does_not_matter() -> None:
    assert check(with_layouts(*reversed(LAYOUTS))) == "shm"


def test_a_cache_announced_twice() -> None:
    assert refused(with_layouts(*LAYOUTS, layout(1))) == "prefill announced layer 1 main more than once"


def test_a_component_that_nobody_knows() -> None:
    assert refused(with_layouts(*LAYOUTS, layout(1, "key\ncache"))) == (
        r"layer 1 'key\ncache' exists only at prefill"
    )


def test_many_differences_are_counted_not_listed() -> None:
    many = tuple(layout(layer, is_draft=False) for layer in range(100))
    reason = refused(with_layouts(*many), components=())
    assert reason.startswith("layer 0 main exists only at prefill; layer 1 main exists only at prefill; ")
    assert reason.endswith("; and 92 more")


def test_long_layouts_are_shown_from_where_they_differ() -> None:
    text = "x" * 3000
    theirs = with_layouts(layout(0, layout=text + " 528 bytes"))
    reason = refused(theirs, components=[layout(0, layout=text + " 512 bytes")])
    assert "528 bytes' at prefill" in reason
    assert "512 bytes' at decode" in reason
    assert len(reason) < 200


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_place_for_every_cache(count: int) -> None:
    assert refused(hello(places=(PLACE,) * count)) == f"prefill announced 4 caches and {count} places"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_stride_bytes": 1023}, "8 blocks 1023 bytes apart are at prefill no place for pages of 1024"),
        ({"num_blocks": 0}, "0 blocks 1024 bytes apart"),
        ({"num_blocks": 1 << 60}, "ends at byte"),
        ({"offset": (1 << 62) - 1}, "ends at byte"),
    ],
)
def test_a_place_that_cannot_exist(changed: dict, reason: str) -> None:
    places = (PLACE, PLACE, msgspec.structs.replace(PLACE, **changed), PLACE)
    assert refused(hello(places=places)).startswith("layer 1 main: ")
    assert reason in refused(hello(places=places))


def test_other_memfabric_protocols() -> None:
    assert refused(memfabric_protocol="device_rdma") == (
        "memfabric_transfer_protocol 'sdma' at prefill, 'device_rdma' at decode"
    )


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_lease_that_never_ends_or_never_begins(lease_s: float) -> None:
    assert "a lease is positive and ends" in refused(hello(lease_s=lease_s))


def test_a_reason_is_never_longer_than_a_message_may_hold() -> None:
    assert len(Mismatch("x" * 10_000).reason) == MAX_TEXT_CHARS
    loud = with_layouts(*(layout(0, "c" * 250 + str(at), layout="y" * 4000) for at in range(50)))
    assert len(refused(loud)) <= MAX_TEXT_CHARS


counts = st.integers(0, (1 << 62) - 1) | st.integers(0, 8)
names = st.sampled_from(["main", "indexer", "scale", "shm", "tcp", ""]) | st.text(max_size=5)


@given(
    hello=st.builds(
        Hello,
        epoch=names,
        version=st.integers(0, 2),
        rank=st.integers(0, 8),
        tp_size=st.integers(0, 8),
        pp_size=st.integers(0, 2),
        components=st.just(LAYOUTS)
        | st.lists(
            st.builds(
                ComponentLayout,
                layer=counts,
                component=names,
                is_draft=st.booleans(),
                page_bytes=counts,
                block_tokens=counts,
                layout=names,
            ),
            max_size=4,
        ).map(tuple),
        places=st.lists(
            st.builds(Place, region=counts, offset=counts, block_stride_bytes=counts, num_blocks=counts),
            min_size=4,
            max_size=4,
        ).map(tuple),
        offers=st.lists(st.builds(TransportOffer, name=names, ticket=st.binary(max_size=4)), max_size=3).map(
            tuple
        ),
        memfabric_protocol=st.just("sdma") | names,
        lease_s=st.floats(),
    )
)
def test_whatever_a_producer_says_it_is_welcome_or_refused(hello: Hello) -> None:
    with contextlib.suppress(Mismatch):
        assert check(hello, tp_size=1, tp_rank=0) in ("shm", "tcp")


def test_a_side_announces_main_before_indexer_layer_by_layer() -> None:
    def spec(layer: int, component: Component, page_bytes: int) -> ComponentSpec:
        return ComponentSpec(
            name=f"{layer}.{component.value}",
            layer=LayerId(layer, component, layer == 2),
            page_bytes=page_bytes,
            block_tokens=16,
            layout="bf16 576",
        )

    specs = [spec(2, Component.MAIN, 7), spec(0, Component.INDEXER, 5), spec(0, Component.MAIN, 9)]
    bundles = build_bundles(specs)
    assert component_layouts(reversed(bundles)) == (
        layout(0, page_bytes=9),
        layout(0, "indexer", page_bytes=5),
        layout(2, page_bytes=7),
    )


def test_a_lone_indexer_is_announced_as_what_it_is() -> None:
    lone = ComponentSpec(
        name="i", layer=LayerId(3, Component.INDEXER, False), page_bytes=5, block_tokens=16, layout="x"
    )
    assert [described.component for described in component_layouts(build_bundles([lone]))] == ["indexer"]


def test_another_model_of_the_same_layout_is_refused_with_both_names() -> None:
    assert check(hello(model="A float32 1"), model="A float32 1") == "shm"
    reason = refused(hello(model="A float32 1"), model="B float32 2")
    assert "'A float32 1' at prefill" in reason
    assert "'B float32 2' at decode" in reason
