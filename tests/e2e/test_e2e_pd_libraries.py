"""Prefill and decode over libraries: the answers of one engine, from rows that NIXL or Mooncake moved."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import sparse
from pd import Fleet, assert_at_rest, free_port, remote
from pd_reads import NOTHING, PASS

from kvstrata.remote.transports.registry import transport_for

pytestmark = pytest.mark.whole_machine

LAYERWISE = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
CHUNKED = {"max_num_batched_tokens": 48}


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse")
@pytest.mark.parametrize("library", ["nixl", "mooncake"])
def test_rows_that_a_library_moved_are_exact(
    library: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    reason = transport_for(library).usable()
    if reason is not None:
        pytest.skip(reason)
    model, expected = model_of("dsa"), transformers_tokens("dsa")
    over = {"transfer_backend": library}
    prefill = {**remote("producer", **LAYERWISE, **over), **CHUNKED}
    decode = {**remote("consumer", free_port(), **over), **sparse(buffer=32)}
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))

        # Negative control: with reads that move nothing, what decode answers is not the model's answer.
        pair.decode.call("set_reads", NOTHING)
        assert pair.ask(model.prompts, NEW_TOKENS) != expected
        pair.decode.call("set_reads", PASS)

        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert_at_rest(pair.prefill, pair.decode)
        pulled = pair.decode.statistics()
        assert pulled["pulls_done"] == pulled["pulls_expected"] == len(pair.adverts)
        assert pulled["bad_messages"] == 0
        assert f"is read over {library}" in pair.decode.log()
