"""What KVPP refuses at start-up, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.core.owners import OwnerPlan, plan_owners
from kvstrata.errors import ConfigurationError, UnsupportedError
from kvstrata.vllm.kvpp_checks import check_kvpp, check_own_caches, check_stored_layers, check_transport
from kvstrata.vllm.settings import Settings


def launch(
    *,
    tp: int = 2,
    pcp: int = 1,
    graphs: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
    dynamic: bool = False,
    layers: dict[str, Any] | None = None,
    role: str | None = None,
    **own: str,
) -> Any:
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: dynamic,
        num_speculative_tokens_per_batch_size=[(1, 4, 2)] if dynamic else None,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, prefill_context_parallel_size=pcp),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(cudagraph_mode=graphs, static_forward_context=layers or {}),
        kv_transfer_config=role
        and SimpleNamespace(
            kv_connector="KVStrataConnector",
            kv_role=role,
            kv_connector_extra_config={"backend": "none", "kv_port": 20001},
        ),
        additional_config={"enable_kvpp": True, "kvstrata": own},
    )


def checked(config: Any) -> None:
    check_kvpp(config, Settings.of(config))
    check_own_caches(config, Settings.of(config))


@pytest.mark.parametrize(
    "config", [launch(), launch(tp=1, pcp=2), launch(graphs=CUDAGraphMode.NONE), launch(role="kv_producer")]
)
def test_what_the_seed_supports_passes(config: Any):
    checked(config)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (launch(tp=1), ConfigurationError, ["enable_kvpp=true", "tensor_parallel_size=1", "2 or more"]),
        (launch(dynamic=True), UnsupportedError, ["num_speculative_tokens_per_batch_size=[(1, 4, 2)]"]),
        (launch(graphs=CUDAGraphMode.FULL), UnsupportedError, ["cudagraph_mode=FULL", "PIECEWISE"]),
        (
            launch(graphs=CUDAGraphMode.FULL_AND_PIECEWISE),
            UnsupportedError,
            ["cudagraph_mode=FULL_AND_PIECEWISE", "PIECEWISE or NONE"],
        ),
        (launch(role="kv_consumer"), UnsupportedError, ["consumer", "prefill engine"]),
        (launch(role="kv_both"), UnsupportedError, ["consumer", "prefill engine"]),
        (
            launch(role="kv_producer", kvpp_transport="collective"),
            UnsupportedError,
            ['kvpp_transport="collective"', '"auto" or "shm"'],
        ),
        (
            launch(layers={"mtp.attn": SimpleNamespace(kv_sharing_target_layer_name="layers.3.attn")}),
            UnsupportedError,
            ["'mtp.attn'", "'layers.3.attn'"],
        ),
    ],
)
def test_what_it_does_not_is_named_with_the_way_out(config: Any, error: Any, words: list[str]):
    with pytest.raises(error) as raised:
        checked(config)
    assert [word for word in words if word not in str(raised.value)] == []
    config.additional_config = {"enable_kvpp": False}
    checked(config)


def test_auto_that_comes_to_the_collective_is_refused_on_a_prefill_engine():
    check_transport("collective", ())
    check_transport("shm", {"producer"})
    with pytest.raises(UnsupportedError, match=r'kvpp_transport="collective" on a prefill engine.*one host'):
        check_transport("collective", {"producer"})


def test_a_store_is_refused_where_a_rank_would_have_nothing_to_save():
    def plan(*, drafts: int) -> OwnerPlan:
        specs = [
            ComponentSpec(
                name=f"layer {at}",
                layer=LayerId(at, Component.MAIN, at >= 2),
                page_bytes=64,
                block_tokens=16,
                layout="rows",
            )
            for at in range(2 + drafts)
        ]
        return plan_owners(build_bundles(specs), group_size=3)

    check_stored_layers(plan(drafts=0), "none")
    check_stored_layers(plan(drafts=1), "local")
    with pytest.raises(
        UnsupportedError, match=r"backend='local' and 3 ranks for 2 layers.*tensor_parallel_size"
    ):
        check_stored_layers(plan(drafts=0), "local")
