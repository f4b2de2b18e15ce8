"""Measurements: ratios taken in one run on one machine, each a median with its raw runs beside it."""
