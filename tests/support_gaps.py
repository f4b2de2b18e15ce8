"""Pairs of features that nothing rules out and no end-to-end test of CI runs in one engine, and why."""

NOT_TESTED_PAIRS: dict[str, str] = {}
"""Reason -> pairs. `tests/unit/test_support_matrix.py` holds it complete, and empty of what a test runs."""
