"""Which end-to-end tests `make test` leaves to `make test-all`.

What is here shows with another model, parameter or pair of engines what a test that stays shows as well:
every pair of features has a test in `make test` (unit/test_support_matrix.py holds that).
"""

from __future__ import annotations

EXTENDED = """
layerwise.py::test_negative_control_sharing_without_loads_is_wrong[dense-small-head]
layerwise.py::test_negative_control_sharing_without_loads_is_wrong[dsa]
layerwise.py::test_any_block_size_is_exact[dense-64]
layerwise.py::test_any_block_size_is_exact[dsa-24]
layerwise.py::test_exactly_the_prefix_is_loaded_and_the_new_blocks_are_saved[dense]
layerwise.py::test_trained_model_reads_its_ledger_through_shared_buffers[3]
main_c8.py::test_int8_main_rows_answer_as_transformers_with_rounded_latents_and_not_without[dense-small-head]
main_c8.py::test_int8_main_rows_answer_as_transformers_with_rounded_latents_and_not_without[dsa]
main_c8.py::test_int8_main_rows_under_layerwise_offload_and_from_the_store_answer_the_same[dense-small-head]
main_c8.py::test_int8_main_rows_of_a_bfloat16_model_are_the_same_bits_under_sparse_offload
main_c8.py::test_int8_main_rows_of_a_draft_layer_too_answer_the_same
modes.py::test_compiled_offload_is_exact[dsa-inductor]
modes.py::test_bfloat16_under_offload_reads_the_same_bits[dense]
modes.py::test_bfloat16_under_offload_reads_the_same_bits[dsa]
modes.py::test_int8_indexer_under_offload_reads_the_same_bits[dsa]
modes.py::test_int8_indexer_without_offload_has_its_own_page_size
plain.py::test_chunked_prefill_is_exact[dense-small-head]
plain.py::test_chunked_prefill_is_exact[dense]
plain.py::test_block_size_does_not_matter[dense-64]
plain.py::test_block_size_does_not_matter[dsa-24]
plain.py::test_traced_engine_is_exact[glm]
plain.py::test_async_scheduling_is_exact[dense]
prefix.py::test_hits_of_an_earlier_call_are_exact[dsa]
prefix.py::test_prefixes_that_end_in_mid_block_are_exact[dsa]
prefix.py::test_blocks_are_reused_after_eviction[dense]
scheduling.py::test_preempted_requests_resume_exactly[dense]
scheduling.py::test_preempted_requests_resume_exactly[dsa-prefix-cache]
scheduling.py::test_blocks_of_aborted_requests_are_reused[1]
scheduling.py::test_blocks_of_aborted_requests_are_reused[7]
scheduling.py::test_async_scheduling_is_exact[dense]
scheduling.py::test_async_scheduling_is_exact[dsa]
scheduling.py::test_a_crowd_in_few_blocks_is_exact[local]
sparse.py::test_sparse_decode_is_exact_in_any_buffer[dsa-32x1]
sparse.py::test_sparse_decode_is_exact_in_any_buffer[dsa-32x8]
sparse.py::test_sparse_decode_is_exact_in_any_buffer[glm-64x1]
sparse.py::test_sparse_decode_is_exact_in_any_buffer[tiny-dsv32-256x1]
sparse.py::test_defaults_read_the_same_bits_in_the_planned_blocks[dsa]
sparse.py::test_negative_control_stale_hot_rows_are_wrong[dsa]
sparse.py::test_negative_control_prompts_without_loads_are_wrong[dsa]
sparse.py::test_trained_model_loses_its_ledger_with_a_fault[skip_loads]
sparse_modes.py::test_drafts_are_exact_and_as_good[192]
sparse_modes.py::test_rounded_values_are_the_same_bits[dsa-bfloat16]
sparse_modes.py::test_traced_offload_is_exact[dsa]
sparse_modes.py::test_any_block_size_is_exact[32]
sparse_rows.py::test_a_short_context_is_loaded_once_and_grows_without_a_round_trip[dsa-4-4]
sparse_scheduling.py::test_preempted_requests_resume_exactly[override]
sparse_scheduling.py::test_preempted_requests_resume_exactly[prefix-cache]
sparse_scheduling.py::test_shared_prefixes_are_exact[dsa]
sparse_store.py::test_hits_and_losses_are_exact[dsa]
store.py::test_hits_of_the_same_engine_are_exact[dense]
store.py::test_hits_of_the_same_engine_are_exact[dsa]
store.py::test_a_store_without_shared_buffers_is_exact[null]
store.py::test_a_store_without_shared_buffers_is_exact[all]
store.py::test_objects_lost_between_lookup_and_read_are_recomputed[1-False-False]
store.py::test_objects_lost_between_lookup_and_read_are_recomputed[2-True-True]
store.py::test_a_lost_prefix_that_requests_share_never_spoils_the_store[True]
store.py::test_strangers_get_no_hits
store.py::test_bfloat16_hits_are_the_bits_that_were_computed
kvpp.py::test_kvpp_is_exact_and_holds_what_the_formula_says[all-compiled]
kvpp.py::test_kvpp_is_exact_and_holds_what_the_formula_says[collective-all]
kvpp.py::test_kvpp_with_drafts_and_both_caches_quantised
kvpp.py::test_kvpp_on_four_ranks[tp4]
kvpp.py::test_kvpp_on_four_ranks[tp2-pp2]
kvpp.py::test_decode_reads_each_layer_out_of_its_owners_memory
parallel.py::test_two_ranks_with_store_are_exact[tp2-dsa]
pd.py::test_layerwise_and_plain_prefill_feed_sparse_and_plain_decode[glm]
pd.py::test_prefix_hits_on_either_side_and_the_store_are_exact[store-first]
pd_failures.py::test_stopped_prefill_wakes_after_its_lease
pd_failures.py::test_killed_decode_in_mid_transfer
pd_failures.py::test_abort_at_decode_before_prefill_begins
pd_failures.py::test_abort_at_prefill_before_the_last_part
pd_failures.py::test_a_metaserver_that_fails_once_is_asked_again
pd_failures.py::test_a_metaserver_that_finds_no_prefill_is_waited_for_no_longer[refuses]
pd_failures.py::test_a_metaserver_that_finds_no_prefill_is_waited_for_no_longer[is-silent]
pd_failures.py::test_a_read_that_fails_is_repeated[truncate]
pd_failures.py::test_reads_that_go_on_failing_end_the_transfer
pd_failures.py::test_a_lost_abort_of_decode_is_made_good
pd_failures.py::test_a_lost_abort_of_prefill_and_its_lost_answer_are_repeated
pd_hosts.py::test_a_link_that_is_away_for_less_than_a_lease_costs_time_only[nixl]
pd_modes.py::test_int8_indexers_on_both_sides_are_exact
pd_modes.py::test_asynchronous_decode_is_exact
shell.py::test_the_readmes_servers_answer_the_readmes_question[sparse]
shell.py::test_the_pages_launch_of_prefill_and_decode_answers_the_pages_question[docs/serving_pd.md]
sparse_parallel.py::test_pipeline_stages_share_the_host_memory
experts.py::test_each_rank_holds_half_of_the_experts_and_answers_are_exact[dense]
experts.py::test_each_rank_holds_half_of_the_experts_and_answers_are_exact[compiled]
experts.py::test_each_rank_holds_half_of_the_experts_and_answers_are_exact[sparse]
experts.py::test_the_draft_layers_experts_are_halved_too_and_draft_as_well
replicas.py::test_replicas_without_loads_are_wrong
replicas.py::test_replicas_of_a_model_without_experts_share_what_they_store
replicas.py::test_each_decode_replica_reads_from_prefill_at_a_port_of_its_own[dsa-without-experts]
together.py::test_stages_of_ranks_are_exact[kvpp-bf16]
together.py::test_stages_of_ranks_are_exact[sparse-float32]
together.py::test_replicas_are_exact[rows-float32]
together.py::test_replicas_are_exact[layers-bf16]
together.py::test_replicas_are_exact[owners-bf16]
together.py::test_replicas_are_exact[owner-stages-float32]
together.py::test_replicas_are_exact[row-stages-float32]
together.py::test_replicas_feed_each_other_and_are_exact[rows-bf16]
together.py::test_replicas_feed_each_other_and_are_exact[layers-float32]
kvpp.py::test_kvpp_with_layer_buffers_and_a_store_is_exact
replicas.py::test_replicas_of_a_model_with_experts_keep_to_their_own_keys
pd_hosts.py::test_three_hosts_answer_as_one_engine_and_every_byte_crosses_the_link[nixl]
pd_hosts.py::test_nobody_listens_but_on_the_addresses_that_the_commands_name[nixl]
sparse_parallel.py::test_negative_control_two_ranks_with_stale_rows_are_wrong
parallel.py::test_two_ranks_without_loads_are_wrong
parallel.py::test_two_ranks_with_store_are_exact[pp2-glm]
together.py::test_transfers_are_exact[owners-store-float32]
together.py::test_transfers_are_exact[owners-async-bf16]
together.py::test_transfers_are_exact[rows-async-float32]
together.py::test_transfers_are_exact[both-store-float32]
together.py::test_replicas_feed_each_other_and_are_exact[rows-float32]
together.py::test_replicas_feed_each_other_and_are_exact[layers-bf16]
together.py::test_replicas_of_owners_feed_one_decode_engine
replicas.py::test_replicas_draft_together_and_are_exact
replicas.py::test_replicas_with_hot_rows_are_exact
pd_hosts.py::test_a_link_that_is_away_for_longer_is_not_waited_for_and_is_used_again[nixl]
together.py::test_transfers_are_exact[owners-async-float32]
together.py::test_transfers_are_exact[rows-store-float32]
together.py::test_transfers_are_exact[rows-async-bf16]
together.py::test_transfers_are_exact[both-store-bf16]
together.py::test_transfers_are_exact[both-async-float32]
"""
"""Ids without `tests/e2e/test_e2e_`."""

_PREFIX = "tests/e2e/test_e2e_"


def left_out() -> frozenset[str]:
    """Return the ids."""
    return frozenset(_PREFIX + line for line in EXTENDED.split())
