"""The checkpoint that demonstrations and benchmarks serve: where it is, and its sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ConfigurationError

SHIPPED_MODEL = Path("examples/models/tiny-dsv32")
FLOAT32_BYTES = 4  # the engines of demonstrations and benchmarks compute and cache in float32


def find_model(model: Path | None) -> Path:
    """Return the checkpoint to use: the one given, or the one that ships with kvstrata's source.

    Raises ConfigurationError if it is not there.
    """
    source = Path(__file__).resolve().parents[3]
    candidates = [model] if model is not None else [SHIPPED_MODEL, source / SHIPPED_MODEL]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigurationError(
        f"--model={candidates[0]}: no config.json there; run from a checkout of kvstrata, "
        "or give the directory of a checkpoint in the pass-key format of examples/models"
    )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the capacity formulas need to know of a checkpoint."""

    num_layers: int
    index_topk: int
    main_row_bytes: int  # one token in one layer's main KV
    indexer_row_bytes: int

    @classmethod
    def of(cls, model: Path) -> ModelShape:
        """Read it from the checkpoint's config.json; raises ConfigurationError if it is no DSA model."""
        config = json.loads((model / "config.json").read_text())
        try:
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                index_topk=int(config["index_topk"]),
                main_row_bytes=FLOAT32_BYTES
                * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])),
                indexer_row_bytes=FLOAT32_BYTES * int(config["index_head_dim"]),
            )
        except KeyError as missing:
            raise ConfigurationError(
                f"--model={model}: its config.json has no {missing}; give a DSA model "
                "(DeepSeek-V3.2 architecture), such as the one in examples/models"
            ) from missing
