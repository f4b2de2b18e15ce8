"""Pairs of features that nothing rules out and no end-to-end test of CI runs in one engine, and why."""

NOT_TESTED_PAIRS: dict[str, str] = {
    "no end-to-end test starts two replicas; ports, ranks and store keys of replicas have unit tests": (
        "layerwise+dp sparse+dp kvpp+dp store+dp prefill+dp decode+dp li-c8+dp sfa-c8+dp tp+dp pp+dp "
        "dp+mtp dp+chunked dp+prefix dp+async dp+compiled dp+bf16"
    ),
}
"""Reason -> pairs. `tests/unit/test_support_matrix.py` holds it complete, and empty of what a test runs."""
