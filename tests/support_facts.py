"""What can be switched on, what is refused together, what no test runs: the facts of the support matrix.

`support_matrix.py` joins them with what the end-to-end tests say they run, and `support_page.py` renders
both; `unit/test_support_matrix.py` holds all of it to the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column of the matrix and the word for it in `pytest.mark.features`."""

    name: str
    knob: str
    meaning: str
    is_ours: bool = False  # kvstrata's own, not vLLM's


FEATURES = (
    Feature(
        name="layerwise",
        knob="`use_layerwise` with `layerwise_num_shared_buffers`",
        meaning="layers take turns in a few device buffers; their KV stays in host memory",
        is_ours=True,
    ),
    Feature(
        name="sparse",
        knob="`sparse_kv_offload_config.enabled`",
        meaning="main KV in host memory; indexer caches and hot rows on the device (DSA models)",
        is_ours=True,
    ),
    Feature(
        name="kvpp",
        knob="`enable_kvpp`, with `tp`",
        meaning="each layer's KV persists on one rank of the tensor-parallel group",
        is_ours=True,
    ),
    Feature(
        name="store",
        knob='`backend` "local"',
        meaning="KV kept across requests and engines",
        is_ours=True,
    ),
    Feature(
        name="prefill",
        knob="`kv_port` with `kv_role` kv_producer",
        meaning="computes prompts that another engine answers",
        is_ours=True,
    ),
    Feature(
        name="decode",
        knob="`kv_port` with `kv_role` kv_consumer",
        meaning="answers prompts whose KV it reads from another engine",
        is_ours=True,
    ),
    Feature(
        name="li-c8",
        knob='`kvstrata.indexer_cache_dtype` "int8"',
        meaning="indexer rows of 8 bits with a scale (DSA models)",
        is_ours=True,
    ),
    Feature(
        name="sfa-c8",
        knob='`kvstrata.main_cache_dtype` "int8"',
        meaning="main rows of 8 bits with scales",
        is_ours=True,
    ),
    Feature(name="tp", knob="`--tensor-parallel-size`", meaning="two ranks or more share each layer"),
    Feature(name="pp", knob="`--pipeline-parallel-size`", meaning="stages of layers"),
    Feature(name="dp", knob="`--data-parallel-size`", meaning="replicas of the engine"),
    Feature(
        name="ep",
        knob="`--enable-expert-parallel`, with `tp` or `dp`",
        meaning="each rank has experts of its own, instead of a part of every one",
    ),
    Feature(
        name="mtp",
        knob='`--speculative-config`, method "mtp", a fixed number of drafts',
        meaning="a draft layer with a cache of its own",
    ),
    Feature(
        name="chunked",
        knob="`--max-num-batched-tokens` below the prompt's length",
        meaning="a prompt takes several steps",
    ),
    Feature(name="prefix", knob="`--enable-prefix-caching`", meaning="hits of vLLM's own prefix cache"),
    Feature(
        name="async", knob="`--async-scheduling`", meaning="a step is planned while the one before it runs"
    ),
    Feature(name="compiled", knob="no `--enforce-eager`", meaning="the model is traced by torch.compile"),
    Feature(name="bf16", knob="`--dtype bfloat16`", meaning="weights and caches in bfloat16"),
)
NAMES = tuple(feature.name for feature in FEATURES)
OURS = tuple(feature.name for feature in FEATURES if feature.is_ours)

NEEDS = {"kvpp": ("tp",), "ep": ("tp", "dp")}
"""A feature that runs only with one of others: who names the first in a mark names one of these."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Features that one engine cannot have together."""

    features: frozenset[str]
    words: str  # of the message, as the source spells them
    test: str  # that shows it
    effect: Literal["refused", "no effect"] = (
        "refused"  # the second: the engine starts and says so in its log
    )


RULES = (
    Rule(
        features=frozenset({"kvpp", "sparse"}),
        words="main KV of all ranks lies in one host pool then, so there is nothing to spread over them",
        test="tests/unit/test_config.py::test_kvpp_and_sparse_offload_are_refused_together",
    ),
    Rule(
        features=frozenset({"kvpp", "decode"}),
        words="every rank would fill the owner's layers; set it to false there",
        test="tests/unit/test_vllm_kvpp_checks.py::test_what_it_does_not_is_named_with_the_way_out",
    ),
    *(
        Rule(
            features=frozenset({role, "pp"}),
            words="remote read knows no stages; set pipeline_parallel_size to 1, or remove kv_port",
            test="tests/unit/test_vllm_combinations.py"
            "::test_remote_read_with_pipeline_stages_is_refused_by_name",
        )
        for role in ("prefill", "decode")
    ),
    Rule(
        features=frozenset({"prefill", "sparse", "tp"}),
        words="ranks write their pool at different times; set it to false on the prefill engine",
        test="tests/unit/test_vllm_combinations.py"
        "::test_sparse_offload_on_several_prefill_ranks_is_refused_by_name",
    ),
    Rule(
        features=frozenset({"layerwise", "sparse"}),
        words="use_layerwise and its knobs change nothing beside sparse decode offload",
        test="tests/unit/test_vllm_combinations.py"
        "::test_layerwise_knobs_beside_sparse_offload_are_said_to_change_nothing",
        effect="no effect",
    ),
    Rule(
        features=frozenset({"store", "async"}),
        words="cannot recompute a block the store lost",
        test="tests/unit/test_vllm_settings.py"
        "::test_fault_11_asynchronous_scheduling_goes_where_a_lost_block_could_not_be_recomputed",
        effect="no effect",
    ),
    Rule(
        features=frozenset({"pp", "async"}),
        words="Model Runner V1 does not support it with pipeline_parallel_size=",
        test="tests/unit/test_vllm_settings.py"
        "::test_asynchronous_scheduling_goes_where_there_are_pipeline_stages",
        effect="no effect",
    ),
    Rule(
        features=frozenset({"pp", "mtp"}),
        words="vLLM 0.32 starts no pipeline stage without the draft layer; set pipeline_parallel_size to 1",
        test="tests/unit/test_vllm_settings.py::test_drafts_with_a_cache_are_refused_with_pipeline_stages",
    ),
    Rule(
        features=frozenset({"pp", "compiled"}),
        words="stages on CPU; set enforce_eager to true",
        test="tests/unit/test_vllm_platform.py::test_traced_pipeline_stages_are_refused_by_name",
    ),
    Rule(
        features=frozenset({"dp", "compiled"}),
        words="cannot trace on CPU how replicas exchange tokens; set enforce_eager to true",
        test="tests/unit/test_vllm_settings.py::test_compiled_replicas_with_experts_are_refused_by_name",
    ),
    Rule(
        features=frozenset({"ep", "dp", "tp"}),
        words="vLLM 0.32 answers wrongly after steps of one token",
        test="tests/unit/test_vllm_settings.py"
        "::test_experts_over_replicas_of_several_ranks_are_refused_by_name",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What is refused outside the matrix: whatever else is on, or with a kind of model or value."""

    what: str
    beside: str  # what refuses it
    words: str
    test: str


_ANY = "any"
_COMBINATION = (
    "tests/unit/test_vllm_settings.py::test_what_cannot_be_combined_is_refused_by_knob_value_and_fix"
)
_KVPP = "tests/unit/test_vllm_kvpp_checks.py::test_what_it_does_not_is_named_with_the_way_out"

LIMITS = (
    Limit(
        what="decode context parallelism (DCP)",
        beside=_ANY,
        words="a rank would hold part of a block; set it to 1",
        test=_COMBINATION,
    ),
    Limit(
        what="prefill context parallelism (PCP)",
        beside=_ANY,
        words="vLLM refuses it on CPU; set it to 1",
        test=_COMBINATION,
    ),
    Limit(
        what="hybrid KV layouts (Mamba, sliding window)",
        beside=_ANY,
        words="is not supported by kvstrata's connector; serve a model with MLA layers only",
        test="tests/unit/test_vllm_layout.py::test_a_second_cache_group_is_refused_as_hybrid",
    ),
    Limit(
        what="models without MLA",
        beside=_ANY,
        words="it has no MLA layers",
        test="tests/e2e/test_e2e_refusals.py::test_a_model_without_mla_is_named",
    ),
    Limit(
        what="vLLM's own 8-bit caches (`--kv-cache-dtype fp8`)",
        beside=_ANY,
        words="set it to auto; for 8-bit main rows set kvstrata.main_cache_dtype to int8",
        test=_COMBINATION,
    ),
    Limit(
        what="`kv_sharing_fast_prefill`",
        beside=_ANY,
        words="layers that share another layer's KV are not planned for; turn it off",
        test=_COMBINATION,
    ),
    Limit(
        what="Model Runner V2",
        beside=_ANY,
        words="the layer hooks need Model Runner V1; unset it",
        test=_COMBINATION,
    ),
    Limit(
        what="MLA models without sparse attention",
        beside="sparse",
        words="so every row is needed in every step; set it to false, and use use_layerwise for long prompts",
        test="tests/e2e/test_e2e_sparse_refusals.py::test_a_model_without_sparse_attention_is_named",
    ),
    Limit(
        what="another connector beside kvstrata's under MultiConnector",
        beside="sparse, kvpp",
        words="where that connector does not look for it; remove it, also from MultiConnector's list",
        test="tests/unit/test_vllm_settings.py"
        "::test_sparse_offload_with_a_connector_beside_ours_is_refused_by_name",
    ),
    Limit(
        what="full graph modes",
        beside="kvpp",
        words="a full graph is replayed without the hooks that wait for a layer; set it to PIECEWISE or NONE",
        test=_KVPP,
    ),
    Limit(
        what="Dynamic-K drafts (`num_speculative_tokens_per_batch_size`)",
        beside="kvpp",
        words="a forward must draft the same number of tokens on every rank",
        test=_KVPP,
    ),
    Limit(
        what="draft layers that use the target's KV",
        beside="kvpp",
        words="set it to false, or serve without that draft model",
        test=_KVPP,
    ),
    Limit(
        what='`kvpp_transport` "collective"',
        beside="kvpp + prefill",
        words="decode reads a layer out of its owner's shared memory",
        test=_KVPP,
    ),
    Limit(
        what="one tensor-parallel rank",
        beside="kvpp",
        words="there is no other rank to keep layers on",
        test=_KVPP,
    ),
    Limit(
        what="a stage that begins with a layer without an indexer",
        beside="pp",
        words="vLLM passes no selection from stage to stage",
        test="tests/unit/test_vllm_layout.py::test_a_pipeline_stage_must_begin_with_a_layer_that_selects_rows",
    ),
    Limit(
        what="`keep_device_kv_cache`",
        beside="sparse + store",
        words="rows that the store brings are not in the device cache",
        test="tests/unit/test_vllm_settings.py"
        "::test_the_kept_device_cache_cannot_judge_rows_that_a_store_brought",
    ),
    Limit(
        what="`prefix_match_unit` other than the block size",
        beside="store",
        words="the store keeps whole blocks",
        test="tests/unit/test_vllm_settings.py::test_hashes_finer_than_a_block_do_not_name_store_objects",
    ),
    Limit(
        what="experts of a quantised model",
        beside="ep",
        words="look for other ranks' experts in their own weights",
        test="tests/unit/test_vllm_settings.py::test_quantised_experts_spread_over_ranks_are_refused_by_name",
    ),
)
