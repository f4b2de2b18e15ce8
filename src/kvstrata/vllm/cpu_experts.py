"""Expert parallelism on CPU: each rank computes the experts that it has.

Stock fault (vLLM 0.32): the CPU kernel of unquantised experts is given ids of all experts and looks for them
in the rank's own weights, past their end. Here it is given ids of the rank's own experts. The kernels of
quantised experts have the same fault and no place to put others in: `settings` refuses them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_METHOD = "UnquantizedFusedMoEMethod"


def own_experts(
    topk_ids: torch.Tensor,  # [T, K] int32, of all experts
    topk_weights: torch.Tensor,  # [T, K]
    expert_map: torch.Tensor,  # [experts] int32, the id on this rank or -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids on this rank and weights, both [T, K]; what another rank computes has id 0 and weight 0."""
    own_ids = expert_map[topk_ids]
    elsewhere = own_ids < 0
    return own_ids.masked_fill(elsewhere, 0), topk_weights.masked_fill(elsewhere, 0)


class OwnExperts:
    """Mixin before a stock class of experts: its kernel sees this rank's experts as if there were no others.

    Called after tokens came in from other ranks, and before outputs are summed over the ranks.
    """

    def apply(self, **arguments: Any) -> None:
        """Write into ``output`` what this rank's experts add; arguments as vLLM's kernel passes them."""
        weights = arguments["topk_weights"]
        if arguments["apply_router_weight_on_input"]:
            # The hidden states are weighted already, and a kernel told so would ignore weight 0.
            weights = torch.ones_like(weights)
            arguments["apply_router_weight_on_input"] = False
        arguments["topk_ids"], arguments["topk_weights"] = own_experts(
            arguments["topk_ids"], weights, arguments["expert_map"]
        )
        super().apply(**arguments)  # type: ignore[misc]


class KVStrataFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantised experts; with expert parallelism, each rank computes its own ones."""

    experts_cls: type[Any]

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if moe.moe_parallel_config.use_ep:
            stock = self.experts_cls
            self.experts_cls = type(f"Own{stock.__name__}", (OwnExperts, stock), {})


def register_cpu_experts() -> None:
    """Put kvstrata's method in place of vLLM's, on its CPU platform; safe to call again."""
    if _METHOD not in op_registry_oot:
        CustomOp.register_oot(name=_METHOD)(KVStrataFusedMoEMethod)
