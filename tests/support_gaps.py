"""Pairs of features that nothing rules out and no end-to-end test of CI runs in one engine, and why."""

NOT_TESTED_PAIRS: dict[str, str] = {
    "no end-to-end test has them together with data-parallel replicas": (
        "kvpp+dp li-c8+dp sfa-c8+dp tp+dp pp+dp dp+mtp dp+prefix dp+async dp+compiled dp+bf16"
    ),
}
"""Reason -> pairs. `tests/unit/test_support_matrix.py` holds it complete, and empty of what a test runs."""
