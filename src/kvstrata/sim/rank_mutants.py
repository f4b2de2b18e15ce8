"""Defects in what drives the machines on each rank; see `sim.mutants`."""

from __future__ import annotations

from kvstrata.core.shares import member_blocks
from kvstrata.sim.decode_rank import DecodeRank
from kvstrata.sim.prefill import Chunk
from kvstrata.sim.prefill_rank import PrefillRank


class PublishesBeforeWriting(PrefillRank):
    """The notice leaves when the layer is enqueued, not when its rows are in their home."""

    def write_layer(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        delay_s = self.setting.options.layer_s + self.setting.options.network_s
        self.process.after(delay_s, super().write_layer, chunks, layer)


class PublishesHalfBlocks(PrefillRank):
    """The end of a chunk is rounded up although more is to come."""

    def ready(self, chunk: Chunk) -> tuple[int, int]:
        first, end = super().ready(chunk)
        block_tokens = self.setting.options.block_tokens
        if chunk.is_begun:
            first = max(chunk.job.first_block, -(-chunk.first_token // block_tokens))
        return first, max(first, end, -(-chunk.end_token // block_tokens))


class SilentWithoutBlocks(PrefillRank):
    """A member without a share of a part says nothing of it."""

    def _publish(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        super()._publish(tuple(chunk for chunk in chunks if self._has_share(chunk, layer)), layer)

    def _has_share(self, chunk: Chunk, layer: int) -> bool:
        job = chunk.job
        for _, component in self.setting.planes_of(layer):
            first, end = member_blocks(
                component,
                job.first_block,
                len(job.blocks),
                member=self.member,
                members=self.setting.topology.ratio,
                main_rank=0,
                main_ranks=1,
            )
            if first < end:
                return True
        return False


class RestartsUnderItsOldEpoch(PrefillRank):
    """Its generations begin anew, under a name that readers believe they know."""

    def epoch(self) -> str:
        return self.name


class TakesTheFirstShare(DecodeRank):
    """All ranks of a shared pool read the same share of main KV."""

    def main_share(self) -> tuple[int, int]:
        _, ranks = super().main_share()
        return 0, ranks
