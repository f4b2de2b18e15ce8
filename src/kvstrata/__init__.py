"""kvstrata: more KV cache than device memory for MLA and sparse-attention models on vLLM."""

__version__ = "0.1.0"
