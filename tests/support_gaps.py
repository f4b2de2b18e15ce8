"""Pairs of features that nothing rules out and no end-to-end test runs in one engine, and why."""

NOT_TESTED_PAIRS: dict[str, str] = {
    "no end-to-end test has them together with data-parallel replicas": (
        "kvpp+dp li-c8+dp sfa-c8+dp tp+dp pp+dp dp+mtp dp+prefix dp+async dp+compiled dp+bf16"
    ),
    "vLLM's Model Runner V1 does not support asynchronous steps in a pipeline": ("pp+async"),
    "one engine as both ends (`kv_role` kv_both): the tests have an engine for each end": ("prefill+decode"),
    "allowed, but slow: whole layers for one token, hot rows for a prompt": (
        "layerwise+decode sparse+prefill"
    ),
    "no end-to-end test has them together with KVPP": ("kvpp+bf16"),
    "no end-to-end test has them together with 8-bit main rows": (
        "prefill+sfa-c8 decode+sfa-c8 sfa-c8+pp sfa-c8+async sfa-c8+compiled"
    ),
    "each is tested with others, and no test has both": (
        "store+decode store+compiled prefill+async prefill+compiled prefill+bf16 decode+compiled "
        "decode+bf16 li-c8+pp li-c8+compiled tp+bf16 pp+mtp pp+prefix pp+compiled pp+bf16 mtp+async "
        "mtp+compiled mtp+bf16 prefix+bf16 async+compiled async+bf16 compiled+bf16"
    ),
}
"""Reason -> pairs. `tests/unit/test_support_matrix.py` holds it complete, and empty of what a test runs."""
