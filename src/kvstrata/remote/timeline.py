"""When a transfer began, became readable and ended; summed for statistics, one line each for the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimelineSums:
    """Seconds summed over `transfers` that ended; a span that a transfer never reached counts as 0."""

    transfers: int = 0
    until_first_part_s: float = 0.0
    between_parts_s: float = 0.0  # from the first part to the last one
    after_last_part_s: float = 0.0  # from the last part, or the beginning, to the end

    def plus(self, ended: Timeline, end_s: float) -> TimelineSums:
        """The sums with one transfer more."""
        first_s = ended.first_part_s if ended.first_part_s is not None else ended.begin_s
        last_s = ended.last_part_s if ended.last_part_s is not None else ended.begin_s
        return TimelineSums(
            transfers=self.transfers + 1,
            until_first_part_s=self.until_first_part_s + first_s - ended.begin_s,
            between_parts_s=self.between_parts_s + last_s - first_s,
            after_last_part_s=self.after_last_part_s + end_s - last_s,
        )


@dataclass(kw_only=True)
class Timeline:
    """Of one transfer on one side, in seconds on the endpoint's clock."""

    begin_s: float
    first_part_s: float | None = None
    last_part_s: float | None = None
    parts: int = 0

    def note_part(self, now_s: float) -> None:
        """A part was published, or is about to be read."""
        if self.first_part_s is None:
            self.first_part_s = now_s
        self.last_part_s = now_s
        self.parts += 1

    def describe(self, end_s: float) -> str:
        """For a log line: seconds after the beginning."""
        if self.first_part_s is None or self.last_part_s is None:
            return f"no part, ended after {end_s - self.begin_s:.3f} s"
        return (
            f"{self.parts} parts, the first after {self.first_part_s - self.begin_s:.3f} s, the last after "
            f"{self.last_part_s - self.begin_s:.3f} s, ended after {end_s - self.begin_s:.3f} s"
        )
