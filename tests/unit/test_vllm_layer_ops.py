"""Where attention meets the data path: the hook comes before the first access to either cache, and ends after
the last read; without metadata nothing happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.batch import plan_batch
from kvstrata.vllm import attention, mla_layer
from kvstrata.vllm.attention import KVStrataMLAImpl
from kvstrata.vllm.hooks import NoHook
from kvstrata.vllm.metadata import KVStrataMetadata

TOKENS, BLOCKS, HEADS, DIM, TOPK = 4, 6, 3, 8, 5
ROW, RANK = 12, 8
LAYER = "model.layers.0.self_attn.attn"


class Watch:
    """Notes what the caches hold when the hook is called."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache, self.calls = cache, []

    def acquire(self, metadata: KVStrataMetadata) -> None:
        self.calls.append(("acquire", self.cache.clone()))

    def release(self, metadata: KVStrataMetadata) -> None:
        self.calls.append(("release", self.cache.clone()))


def batch() -> tuple[KVStrataMetadata, torch.Tensor]:
    """One request with 6 tokens before, 3 new ones, and a padded token that has no slot."""
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    starts, ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    slots = torch.tensor([1 * TOKENS + 2, 1 * TOKENS + 3, 3 * TOKENS, -1])
    metadata = KVStrataMetadata(
        plan=plan_batch(starts, ends, table, TOKENS),
        num_reqs=1,
        num_actual_tokens=3,
        query_start_loc=starts,
        seq_lens=ends,
        block_table=table,
        slot_mapping=slots,
        num_decodes=1,
        num_decode_tokens=3,
    )
    return metadata, slots


@pytest.fixture
def indexer(monkeypatch: pytest.MonkeyPatch) -> Any:
    metadata, slots = batch()
    cache = torch.randn(BLOCKS, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    layer = SimpleNamespace(hook=Watch(cache), quantised=False, kernels=kernels_for("cpu"), near=None)
    context = SimpleNamespace(attn_metadata={LAYER: metadata})
    monkeypatch.setattr(mla_layer, "get_forward_context", lambda: context)
    monkeypatch.setattr(mla_layer, "get_attention_context", lambda name: (metadata, layer, cache, slots))
    monkeypatch.setattr(mla_layer, "_resolve_layer_name", lambda name: name)
    return SimpleNamespace(cache=cache, layer=layer, context=context, slots=slots)


def run(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(4, HEADS, DIM, generator=generator)
    k = torch.randn(4, DIM, generator=generator)
    weights = torch.rand(4, HEADS, generator=generator)
    out = torch.full((6, TOPK), -7, dtype=torch.int32)
    mla_layer.kvstrata_indexer(q, k, weights, out, LAYER, TOPK)
    return q, k, weights, out


def test_fault_17_the_indexer_waits_for_its_layer_before_it_writes_or_reads(indexer: Any):
    before = indexer.cache.clone()
    q, k, weights, out = run()
    ((what, held),) = indexer.layer.hook.calls
    assert what == "acquire", "attention releases the layer, not the indexer"
    assert torch.equal(held, before), "called before the first write"
    rows = indexer.cache.view(-1, DIM)
    assert torch.equal(rows[indexer.slots[:3]], k[:3])
    untouched = torch.ones(BLOCKS * TOKENS, dtype=torch.bool)
    untouched[indexer.slots[:3]] = False
    assert torch.equal(rows[untouched], before.view(-1, DIM)[untouched]), "fault 6: -1 writes nowhere"

    context = torch.cat([rows[16:20], rows[4:8], rows[12:16]])[:9]
    for token in range(3):
        position = 6 + token
        scores = (torch.relu(q[token] @ context[: position + 1].T) * weights[token][:, None]).sum(0)
        assert out[token].tolist() == sorted(scores.topk(TOPK).indices.tolist())
    assert (out[3:] == -7).all(), "rows of no token are left alone"


def test_the_indexer_is_silent_without_metadata(indexer: Any):
    before = indexer.cache.clone()
    indexer.context.attn_metadata = None
    *_, out = run()
    assert indexer.layer.hook.calls == []
    assert torch.equal(indexer.cache, before)
    assert (out == -7).all()


def test_the_fake_indexer_does_nothing():
    nothing = torch.empty(0)
    assert mla_layer._kvstrata_indexer_fake(nothing, nothing, nothing, nothing, LAYER, TOPK) is None


@pytest.fixture
def impl() -> KVStrataMLAImpl:
    return KVStrataMLAImpl(HEADS, ROW, 0.5, 1, None, None, "auto", None, "decoder", None, kv_lora_rank=RANK)


def forward_context(monkeypatch: pytest.MonkeyPatch, metadata: Any) -> None:
    monkeypatch.setattr(
        "vllm.forward_context.get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata)
    )


def write(impl: KVStrataMLAImpl, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    rows = torch.randn(4, ROW, generator=torch.Generator().manual_seed(3))
    impl.do_kv_cache_update(rows[:, :RANK], rows[:, None, RANK:], cache, slots, "auto", torch.ones(1))
    return rows


def test_M1_main_rows_are_written_after_acquire_and_released_after_attention(  # noqa: N802
    impl: KVStrataMLAImpl, monkeypatch: pytest.MonkeyPatch
):
    metadata, slots = batch()
    cache = torch.randn(BLOCKS, TOKENS, ROW, generator=torch.Generator().manual_seed(1))
    before, hook = cache.clone(), Watch(cache)
    impl.bind(LAYER, hook)
    forward_context(monkeypatch, {LAYER: metadata})
    rows = write(impl, cache, slots)
    assert [what for what, _ in hook.calls] == ["acquire"]
    assert torch.equal(hook.calls[0][1], before)
    assert torch.equal(cache.view(-1, ROW)[slots[:3]], rows[:3])

    def attend(q: torch.Tensor, *given: Any) -> torch.Tensor:
        assert [what for what, _ in hook.calls] == ["acquire"], "still held while attention reads"
        assert q.shape == (3, HEADS, ROW), "latent and rope parts are joined"
        return q[..., :RANK]

    monkeypatch.setattr(impl.window, "attend", attend)
    parts = torch.randn(3, HEADS, RANK), torch.randn(3, HEADS, ROW - RANK)
    out, lse = impl.forward_mqa(parts, cache, metadata, None)
    assert torch.equal(out, parts[0])
    assert lse is None
    assert [what for what, _ in hook.calls] == ["acquire", "release"]


@pytest.mark.parametrize("metadata", [None, {}, {LAYER: object()}, [{}]])
def test_hooks_are_silent_without_metadata_of_the_layer(
    impl: KVStrataMLAImpl, monkeypatch: pytest.MonkeyPatch, metadata: Any
):
    cache = torch.zeros(BLOCKS, TOKENS, ROW)
    hook = Watch(cache)
    impl.bind(LAYER, hook)
    forward_context(monkeypatch, metadata)
    write(impl, cache, torch.tensor([0, 1, 2, -1]))
    assert hook.calls == []
    write(impl, torch.empty(0), torch.tensor([0, 1, 2, -1]))
    assert hook.calls == []


def test_a_layer_without_offload_never_asks_for_the_forwards_metadata(
    impl: KVStrataMLAImpl, monkeypatch: pytest.MonkeyPatch
):
    assert isinstance(impl.hook, NoHook)
    monkeypatch.setattr(attention, "forward_metadata", lambda name: pytest.fail("asked"))
    cache = torch.zeros(BLOCKS, TOKENS, ROW)
    rows = write(impl, cache, torch.tensor([5, 6, 7, -1]))
    assert torch.equal(cache.view(-1, ROW)[5:8], rows[:3])


@pytest.mark.parametrize(
    "given", [{"sliding_window": 64}, {"logits_soft_cap": 30.0}, {"alibi_slopes": [0.5]}]
)
def test_what_the_backend_cannot_compute_is_refused(given: dict[str, Any]):
    wanted = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, **given}
    with pytest.raises(NotImplementedError, match="no sliding window, logits soft cap or ALiBi"):
        KVStrataMLAImpl(
            HEADS,
            ROW,
            0.5,
            1,
            wanted["alibi_slopes"],
            wanted["sliding_window"],
            "auto",
            wanted["logits_soft_cap"],
            "decoder",
            None,
            kv_lora_rank=RANK,
        )
