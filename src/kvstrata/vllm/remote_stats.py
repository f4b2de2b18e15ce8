"""What remote read counts, under the keys of the metrics; `docs/metrics.md` says how they hang together."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.remote.endpoint_statistics import ConsumerEndpointStatistics, ProducerEndpointStatistics
from kvstrata.remote.protocol.actions import Ending

from .metric import metric_table

REMOTE_METRICS = metric_table("""
    sends_opened | remote_sends | Prefill: transfers offered to decode, one a rank; done, failed, aborted, \
        lapsed or open.
    sends_done | remote_done_sends | Prefill: transfers that were read whole.
    sends_failed | remote_failed_sends | Prefill: transfers that decode could not read or refused.
    sends_aborted | remote_aborted_sends | Prefill: transfers that were called off.
    sends_lapsed | remote_lapsed_sends | Prefill: transfers whose lease ran out: decode was silent.
    sends_open | remote_open_sends | Prefill: transfers whose blocks are held for decode, leases open. | gauge
    published_parts | remote_published_parts | Parts of layers shown to decode.
    publish_wait_s | remote_publish_wait_seconds | Seconds that parts waited until their rows were in the \
        host pool.
    owner_ends | remote_owner_ends | Prefill: processes that served reads over a library and ended by \
        themselves.
    owner_restarts | remote_owner_restarts | Prefill: such processes that were started again and serve; \
        while fewer than the ends, reads fail.
    pulls_expected | remote_pulls | Decode: transfers expected, one a rank; done, failed, aborted, lapsed \
        or open.
    pulls_done | remote_done_pulls | Decode: transfers that arrived whole.
    pulls_failed | remote_failed_pulls | Decode: transfers that failed; the prompt was computed here.
    pulls_aborted | remote_aborted_pulls | Decode: transfers that were called off.
    pulls_lapsed | remote_lapsed_pulls | Decode: transfers given up because prefill was silent or never began.
    pulls_open | remote_open_pulls | Decode: transfers waited for. | gauge
    quarantined_blocks | remote_quarantined_blocks | Decode: blocks of transfers that are over and still \
        being written to. | gauge
    pulled_parts | remote_pulled_parts | Decode: parts of layers that arrived.
    pulled_bytes | remote_pulled_bytes | Decode: bytes read from prefill.
    pull_read_s | remote_read_seconds | Decode: seconds spent reading, over all readers.
    pull_queue_s | remote_reader_wait_seconds | Decode: seconds that parts waited for a free reader.
    retried_reads | remote_retried_reads | Decode: reads begun again after an error.
    until_first_part_s | remote_until_first_part_seconds | Seconds from the beginning of a transfer to its \
        first part, summed.
    between_parts_s | remote_between_parts_seconds | Seconds from the first part of a transfer to its last \
        one, summed.
    after_last_part_s | remote_after_last_part_seconds | Seconds from the last part of a transfer to its \
        end, summed.
    stale_messages | remote_stale_messages | Messages dropped because they belonged to an earlier life or \
        an ended transfer.
    bad_messages | remote_bad_messages | Messages dropped because they were malformed or did not know the \
        secret.
""")


def sender_counts(statistics: ProducerEndpointStatistics) -> dict[str, float]:
    """Return prefill's totals since start."""
    return {
        "sends_opened": statistics.opened,
        **_by_ending("sends", statistics.settled),
        "sends_open": statistics.transfers_open,
        "published_parts": statistics.published_parts,
        "publish_wait_s": sum(statistics.waits_s.values()),
        "owner_ends": sum(one.owner_ends for one in statistics.transports.values()),
        "owner_restarts": sum(one.owner_restarts for one in statistics.transports.values()),
        **_of_either_side(statistics),
    }


def receiver_counts(statistics: ConsumerEndpointStatistics) -> dict[str, float]:
    """Return decode's totals since start."""
    return {
        "pulls_expected": statistics.expected,
        **_by_ending("pulls", statistics.finished),
        "pulls_open": statistics.transfers_open,
        "quarantined_blocks": statistics.quarantined_blocks,
        "pulled_parts": statistics.layers_read,
        "pulled_bytes": statistics.read_bytes,
        "pull_read_s": statistics.read_s,
        "pull_queue_s": statistics.reads.queued_s,
        "retried_reads": statistics.machine.retried_reads,
        **_of_either_side(statistics),
    }


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two counts, in the order of their keys; what one of them lacks counts as 0."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted(one.keys() | other.keys())}


def _by_ending(transfers: str, endings: Mapping[str, int]) -> dict[str, float]:
    return {f"{transfers}_{ending.value}": endings.get(ending.value, 0) for ending in Ending}


def _of_either_side(
    statistics: ProducerEndpointStatistics | ConsumerEndpointStatistics,
) -> dict[str, float]:
    return {
        "stale_messages": sum(statistics.machine.dropped.values()),
        "bad_messages": sum(statistics.codec.dropped.values()),
        "until_first_part_s": statistics.timeline.until_first_part_s,
        "between_parts_s": statistics.timeline.between_parts_s,
        "after_last_part_s": statistics.timeline.after_last_part_s,
    }
