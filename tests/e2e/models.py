"""Checkpoints the engines run: seeded random ones in several shapes, and the trained ones the project ships.

The random models are made so that a wrong row shows. Query projections are scaled up, so attention is peaked
and one row decides an output; 32 index heads keep indexer scores from tying at zero; the seeds are those for
which no greedy choice in the tests is a near tie (`references.py` checks it).
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLE_MODELS = Path(__file__).parents[2] / "examples" / "models"
FLOAT32_BYTES = 4
QUERY_GAIN = 3.0


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a model caches, from which the expected page sizes follow independently of the code under test."""

    layers: int  # draft layers not counted
    main_row_elements: int  # kv_lora_rank + qk_rope_head_dim
    index_row_elements: int = 0
    index_layers: tuple[int, ...] = ()

    def main_page_bytes(self, block_size: int) -> int:
        return block_size * self.main_row_elements * FLOAT32_BYTES

    def index_page_bytes(self, block_size: int) -> int:
        return block_size * self.index_row_elements * FLOAT32_BYTES

    def plain_block_bytes(self, block_size: int) -> int:
        """Device bytes of one block when every layer has its own buffer."""
        return self.layers * self.main_page_bytes(block_size) + len(
            self.index_layers
        ) * self.index_page_bytes(block_size)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint on disk and the prompts that are asked of it."""

    name: str
    path: Path
    cache: CacheShape
    prompts: tuple[tuple[int, ...], ...]
    max_model_len: int = 512


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one seeded random model is made: its transformers class and what differs from the defaults."""

    architecture: str
    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    # Keys vLLM reads that the transformers class does not write.
    extra: dict[str, Any] = field(default_factory=dict)


_MLA_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_INDEXER = {"index_topk": 32, "index_head_dim": 128, "index_n_heads": 32}

RECIPES: dict[str, Recipe] = {
    # The DeepSeek-V3 row of 576 elements.
    "dense": Recipe(
        architecture="DeepseekV3ForCausalLM", seed=1, overrides={**_MLA_BASE, "n_group": 2}, extra=_ROUTER
    ),
    # A head size no kernel was written for.
    "dense-small-head": Recipe(
        architecture="DeepseekV3ForCausalLM",
        seed=2,
        overrides={**_MLA_BASE, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
        extra=_ROUTER,
    ),
    "dsa": Recipe(
        architecture="DeepseekV32ForCausalLM", seed=3, overrides={**_MLA_BASE, **_INDEXER}, extra=_ROUTER
    ),
    # IndexShare: layers 2 and 4 reuse the selection of the layer before and have no indexer cache.
    "glm": Recipe(
        architecture="GlmMoeDsaForCausalLM",
        seed=4,
        overrides={
            **_MLA_BASE,
            **_INDEXER,
            "num_hidden_layers": 6,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 2,
        },
        extra={**_ROUTER, "indexer_rope_interleave": True},
    ),
    # To vLLM, data-parallel replicas of a model without experts are engines of their own.
    "dsa-without-experts": Recipe(
        architecture="DeepseekV32ForCausalLM",
        seed=6,
        overrides={**_MLA_BASE, **_INDEXER, "first_k_dense_replace": 4},
        extra={**_ROUTER, "n_routed_experts": 0},
    ),
    # Neither MLA nor sparse: kvstrata must leave it alone.
    "llama": Recipe(
        architecture="LlamaForCausalLM",
        seed=5,
        overrides={
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

CACHE_SHAPES: dict[str, CacheShape] = {
    "dense": CacheShape(layers=4, main_row_elements=576),
    "dense-small-head": CacheShape(layers=4, main_row_elements=80),
    "dsa": CacheShape(layers=4, main_row_elements=576, index_row_elements=128, index_layers=(0, 1, 2, 3)),
    "dsa-without-experts": CacheShape(
        layers=4, main_row_elements=576, index_row_elements=128, index_layers=(0, 1, 2, 3)
    ),
    "glm": CacheShape(layers=6, main_row_elements=576, index_row_elements=128, index_layers=(0, 1, 3, 5)),
    "llama": CacheShape(layers=3, main_row_elements=2 * 2 * 32),
    "tiny-dsv32": CacheShape(
        layers=6, main_row_elements=576, index_row_elements=128, index_layers=tuple(range(6))
    ),
    "tiny-dsv32-mtp": CacheShape(
        layers=6, main_row_elements=576, index_row_elements=128, index_layers=tuple(range(6))
    ),
}

# One token, inside a block, a full block, several blocks and one row, many blocks: block size 16.
PROMPT_LENGTHS = (1, 11, 64, 129, 250)


def random_prompts(
    seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS, vocab_size: int = 512
) -> list[list[int]]:
    """Prompts of the given lengths in tokens, all starting with the begin-of-text token."""
    rng = random.Random(seed)
    return [[1] + [rng.randrange(4, vocab_size) for _ in range(length - 1)] for length in lengths]


def build_seeded(name: str, root: Path) -> Model:
    """Write the named random checkpoint under `root` in float32, the same bytes on every call."""
    import torch
    import transformers

    recipe = RECIPES[name]
    # By name: importing vLLM re-registers some model types, and Auto classes would then pick another.
    model_class = getattr(transformers, recipe.architecture)
    model = model_class(model_class.config_class(**recipe.overrides)).to(torch.float32)
    _fill(model, torch.Generator().manual_seed(recipe.seed))
    path = root / name
    model.save_pretrained(path)
    config_file = path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | recipe.extra, indent=1))
    prompts = random_prompts(recipe.seed)
    return Model(
        name=name, path=path, cache=CACHE_SHAPES[name], prompts=tuple(tuple(prompt) for prompt in prompts)
    )


def _fill(model: Any, generator: Any) -> None:
    """Give every parameter and the router bias seeded values, independent of library initialisation."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                gain = QUERY_GAIN if ".q_b_proj." in name or ".q_proj." in name else 1.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.02 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.02 * torch.randn(buffer.shape, generator=generator))


@functools.cache
def _reference_cases() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((EXAMPLE_MODELS / "ref.json").read_text()))


def trained(name: str = "tiny-dsv32", *, longest_tokens: int = 520) -> Model:
    """The shipped trained model with the prompts of its reference file up to `longest_tokens`."""
    return Model(
        name=name,
        path=EXAMPLE_MODELS / name,
        cache=CACHE_SHAPES[name],
        prompts=tuple(tuple(case["prompt"]) for case in trained_cases(longest_tokens=longest_tokens)),
        max_model_len=1024,
    )


def trained_cases(*, longest_tokens: int = 520) -> list[dict[str, Any]]:
    """Entries of the reference file: `prompt` and `out` token ids, `name`, `min_gap`."""
    return [case for case in _reference_cases() if len(case["prompt"]) <= longest_tokens]


LEDGER_NAMES = (
    *(
        "tiger",
        "lion",
        "zebra",
        "horse",
        "mouse",
        "eagle",
        "robin",
        "raven",
        "shark",
        "whale",
        "otter",
        "panda",
    ),
    *(
        "camel",
        "koala",
        "lemur",
        "moose",
        "bison",
        "goose",
        "finch",
        "heron",
        "crane",
        "viper",
        "cobra",
        "gecko",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """24 facts in one context and a prompt for each of them.

    One damaged row of the context changes some answer in nine of ten cases, where a single question sees
    almost none (examples/models/README.md).
    """

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]  # what a model that reads every row right says


def ledger(seed: int) -> Ledger:
    """A ledger in the format the shipped model was trained on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EXAMPLE_MODELS / "tiny-dsv32" / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    rng = random.Random(seed)
    names = rng.sample(LEDGER_NAMES, len(LEDGER_NAMES))
    values = ["".join(rng.choice("0123456789") for _ in range(4)) for _ in names]
    # Piece by piece: the model never saw a token that spans two of these pieces.
    context = encode("<s>") + encode("<|user|>")
    for name, value in zip(names, values, strict=True):
        context += encode(name) + encode(" = ") + encode(value) + encode("\n")
    prompts = [context + encode(name) + encode("?") + encode("<|assistant|>") for name in names]
    answers = [
        encode(name) + encode(" -> ") + encode(value) + encode("</s>")
        for name, value in zip(names, values, strict=True)
    ]
    return Ledger(prompts=tuple(map(tuple, prompts)), answers=tuple(map(tuple, answers)))
