"""How long a transfer at decode waits: for its members to open, for a word of each, for something new."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.remote.consumer.member import Member

QUIET_WAITS = 5
"""A prefill that has opened the transfer, lives and publishes nothing is waited for so many times `wait_s`.

It may have a long queue. Whoever gave up on it would add to somebody's work what prefill does anyway.
"""


class Patience:
    """Of one transfer. `members` are those that have opened it, of `wanted`; 0 before the first has."""

    def __init__(self, wait_s: float, now_s: float) -> None:
        self._wait_s = wait_s
        self._begun_s = now_s  # of the wait for members
        self._progress_s = now_s

    def begin(self, now_s: float) -> None:
        """The first member has opened: from now on the others are waited for."""
        self._begun_s = now_s

    def progress(self, now_s: float) -> None:
        """Something new: a member, a part, the end of a read."""
        self._progress_s = now_s

    def end_s(self, members: Mapping[int, Member], wanted: int) -> float:
        """When `exhausted` gives a reason, if nothing comes before."""
        due_s = [member.lapse_s for member in members.values() if member.is_awaited]
        due_s.append(self._quiet_s(members))
        if len(members) < wanted:
            due_s.append(self._begun_s + self._wait_s)
        return min(due_s)

    def exhausted(self, members: Mapping[int, Member], wanted: int, now_s: float) -> str | None:
        """Return in words what was waited for too long, None while nothing was."""
        silent = [member for member in members.values() if member.is_silent(now_s)]
        if silent:
            names = ", ".join(str(member.number) for member in silent)
            return f"member {names} of prefill said nothing of the transfer for {silent[0].peer.lease_s:g} s"
        absent = sorted(set(range(wanted)) - members.keys())
        if absent and now_s >= self._begun_s + self._wait_s:
            names = ", ".join(map(str, absent[:8]))
            return f"member {names} of {wanted} did not open within {self._wait_s:g} s of the first"
        if now_s < self._quiet_s(members):
            return None
        if not members:
            return f"no prefill opened the transfer within {self._wait_s:g} s"
        missing = [
            f"layer {next(member.parts.incomplete_layers())} of member {member.number}"
            for member in members.values()
            if member.is_awaited
        ]
        return f"nothing new for {QUIET_WAITS * self._wait_s:g} s; missing is {', '.join(missing[:8])}"

    def _quiet_s(self, members: Mapping[int, Member]) -> float:
        return self._progress_s + self._wait_s * (QUIET_WAITS if members else 1)
