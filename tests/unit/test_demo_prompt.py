"""The demonstration's model, its formula and its prompts."""

from pathlib import Path

import pytest
from demo_fakes import letters

from kvstrata.demo.layerwise import formula
from kvstrata.demo.model import ModelShape, find_model
from kvstrata.demo.prompt import DemoPrompt, build_prompt, handbook
from kvstrata.errors import ConfigurationError, KVStrataError


def test_the_sizes_of_the_shipped_model():
    assert ModelShape.of(find_model(None)) == ModelShape(
        num_layers=6, index_topk=64, main_row_bytes=2304, indexer_row_bytes=512
    )


def test_a_model_without_an_indexer_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "kv_lora_rank": 512}')
    with pytest.raises(ConfigurationError, match="index_topk"):
        ModelShape.of(tmp_path)


@pytest.mark.parametrize(
    ("layers", "independent", "shared", "ratio"),
    [(6, 1, 2, 2.0), (27, 1, 6, 27 / 7), (6, 1, 9, 1.0), (6, 0, 1, 6.0)],
)
def test_the_formula_of_the_seed(layers: int, independent: int, shared: int, ratio: float):
    assert formula(
        num_layers=layers, num_independent=independent, num_shared_buffers=shared
    ) == pytest.approx(ratio)


@pytest.mark.parametrize("depth", [0.0, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("prompt_tokens", [300, 1000, 4000])
def test_prompt_holds_the_fact_once_where_it_says(prompt_tokens: int, depth: float):
    prompt = build_prompt(
        letters, text=handbook(), prompt_tokens=prompt_tokens, pass_key="90210", depth=depth
    )
    assert isinstance(prompt, DemoPrompt)
    assert prompt_tokens - 90 < len(prompt.token_ids) <= prompt_tokens
    text = "".join(map(chr, prompt.token_ids))
    assert text == prompt.text
    assert text.count("The pass key is 90210.\n") == 1
    assert text.index("The pass key is 90210.\n") == prompt.fact_position_tokens
    assert text.startswith("<s><|user|>")
    assert text.endswith("\nWhat is the pass key?<|assistant|>")
    assert prompt.expected_answer == "The pass key is 90210."


def test_a_text_too_short_for_the_prompt_is_an_error():
    with pytest.raises(KVStrataError, match="prompt_tokens=100000"):
        build_prompt(letters, text=handbook(), prompt_tokens=100_000, pass_key="1", depth=0.5)
