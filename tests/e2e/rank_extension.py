"""Methods for tests that vLLM adds to its worker class (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any

EXTENSION = {"worker_extension_cls": "rank_extension.RankExtension"}  # engine arguments
HELD_EXPERTS = "held_experts"
COUNT_OTHERS = "count_others_experts"
CHECK_INTEGRITY = "check_own_integrity"


class RankExtension:
    """What a rank says of itself, and a fault to put into it."""

    def held_experts(self) -> dict[str, Any]:
        """Experts of each layer, draft layers included: their ids, how many have weights, bytes of these."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        models = [runner.model] + ([runner.drafter.model] if hasattr(runner, "drafter") else [])
        layers = {
            module.layer_name: module
            for model in models
            for module in model.modules()
            if isinstance(module, RoutedExperts)
        }
        return {
            "ids": {name: layer.expert_map_manager.get_local_expert_ids() for name, layer in layers.items()},
            "counts": {name: len(layer.w13_weight) for name, layer in layers.items()},
            "bytes": sum(layer.w13_weight.nbytes + layer.w2_weight.nbytes for layer in layers.values()),
        }

    def count_others_experts(self) -> None:
        """Put a fault in: what another rank computes is added here too, by an expert of this rank."""
        from kvstrata.vllm import cpu_experts

        def own_experts(topk_ids: Any, topk_weights: Any, expert_map: Any) -> tuple[Any, Any]:
            return expert_map[topk_ids].clamp(min=0), topk_weights

        cpu_experts.own_experts = own_experts

    def check_own_integrity(self) -> None:
        """Let data path and remote read of this rank check themselves."""
        from kvstrata.vllm.worker import own_connector

        connector = own_connector()
        assert connector._data_path is not None
        connector._data_path.check_integrity()
        if connector._remote is not None:
            connector._remote.check_integrity()
