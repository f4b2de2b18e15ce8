"""Movement of KV between home and window: copy plans, lanes that run in order, tokens to wait for."""

from kvstrata.move.registry import engine_for

__all__ = ["engine_for"]
