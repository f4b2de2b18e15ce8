"""Prefill's side of a remote read: the machine, its endpoint, and what publishes layers."""
