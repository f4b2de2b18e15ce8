"""With expert parallelism, what the ranks' kernels give adds up to what one kernel gives for all experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from kvstrata.vllm import cpu_experts
from kvstrata.vllm.cpu_experts import KVStrataFusedMoEMethod, OwnExperts, own_experts

EXPERTS, HIDDEN, INTER = 8, 64, 32
PLACEMENTS = {
    "linear": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "round-robin": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "unequal": [[0, 1, 2], [3, 4, 5, 6, 7]],
}


def map_to(own: list[int]) -> torch.Tensor:
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[own] = torch.arange(len(own), dtype=torch.int32)
    return expert_map


def kernel(*bases: type) -> Any:
    """A stock class of experts as one layer has it, without what builds a layer."""
    experts: Any = object.__new__(type("Experts", (*bases, CPUUnquantizedExperts), {}))
    experts.quant_config = FusedMoEQuantConfig.make()
    experts._use_zentorch = False
    return experts


def output_of(experts: Any, ids: list[int], batch: dict[str, Any], weights: tuple[torch.Tensor, ...]) -> Any:
    """What a rank with these experts adds."""
    w13, w2 = (cpu_prepack_moe_weight(w[ids].contiguous(), "vec") for w in weights)
    # Whatever was there is overwritten.
    output = torch.full_like(batch["hidden_states"], float("nan"))
    experts.apply(
        output=output,
        w1=w13,
        w2=w2,
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=map_to(ids),
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        **batch,
    )
    return output


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator) * HIDDEN**-0.5
    return w13, torch.randn(EXPERTS, HIDDEN, INTER, generator=generator)


def batch_of(tokens: int, topk: int, *, weighted_input: bool = False) -> dict[str, Any]:
    """Every choice of experts occurs in turn: both on one rank, one on each, none on the first."""
    generator = torch.Generator().manual_seed(tokens)
    pairs = [[(token * 3 + k * 5) % EXPERTS for k in range(topk)] for token in range(tokens)]
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, generator=generator),
        "topk_ids": torch.tensor(pairs, dtype=torch.int32),
        "topk_weights": torch.rand(tokens, topk, generator=generator) + 0.1,
        "apply_router_weight_on_input": weighted_input,
    }


@pytest.mark.parametrize("own", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize(
    ("tokens", "topk", "weighted_input"), [(1, 2, False), (37, 3, False), (1, 1, True), (19, 1, True)]
)
def test_what_the_ranks_add_is_what_all_experts_give(
    own: list[list[int]],
    tokens: int,
    topk: int,
    weighted_input: bool,
    weights: tuple[torch.Tensor, torch.Tensor],
):
    batch = batch_of(tokens, topk, weighted_input=weighted_input)
    whole = output_of(kernel(), list(range(EXPERTS)), batch, weights)
    given = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    parts = [output_of(kernel(OwnExperts), ids, batch, weights) for ids in own]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    elsewhere = [~torch.isin(batch["topk_ids"], torch.tensor(ids)).any(1) for ids in own]
    for part, none_here in zip(parts, elsewhere, strict=True):
        assert not part[none_here].any(), "a token without an expert here got something here"
    assert all(torch.equal(batch[key], value) for key, value in given.items()), "the router's tensors changed"


def test_an_expert_elsewhere_has_a_legal_id_and_weight_0():
    ids = torch.tensor([[5, 0], [7, 6]], dtype=torch.int32)
    mapped, weights = own_experts(ids, torch.tensor([[0.5, 0.25], [1.0, 2.0]]), map_to([5, 6]))
    assert mapped.tolist() == [[0, 0], [0, 1]]
    assert weights.tolist() == [[0.5, 0.0], [0.0, 2.0]]
    assert mapped.dtype is torch.int32, "what the kernel reads"


@pytest.mark.parametrize("use_ep", [False, True])
def test_without_expert_parallelism_the_stock_experts_stay(use_ep: bool, monkeypatch: pytest.MonkeyPatch):
    def stock(self: Any, moe: Any) -> None:
        self.experts_cls = CPUUnquantizedExperts

    monkeypatch.setattr(cpu_experts.UnquantizedFusedMoEMethod, "__init__", stock)
    method = object.__new__(KVStrataFusedMoEMethod)
    method.__init__(SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=use_ep)))
    assert issubclass(method.experts_cls, CPUUnquantizedExperts)
    assert issubclass(method.experts_cls, OwnExperts) is use_ep
    assert (method.experts_cls is CPUUnquantizedExperts) is not use_ep
