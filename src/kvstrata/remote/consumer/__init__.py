"""Decode's side of a remote read: the machine, its endpoint, and what reads on its behalf."""
