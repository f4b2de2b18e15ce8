"""The lease table against a plain list of everything that ever happened to each lease."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from kvstrata.core.lease import LeaseTable

KEYS = st.sampled_from(["k0", "k1", "k2"])
HOLDERS = st.sampled_from(["a", "b"])
DURATIONS = st.integers(1, 6)


class LeaseMachine(RuleBasedStateMachine):
    """The oracle scans one record per grant; nothing in it is ordered by deadline or removed."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.now_s = 0
        self.table = LeaseTable(lambda: float(self.now_s))
        # generation -> [key, end, released, reported]
        self.grants = {}
        self.counts = dict.fromkeys(("refused_held", "renewed", "rejected_stale"), 0)

    def live(self, key):
        return [
            g
            for g, (k, end, released, _) in self.grants.items()
            if k == key and not released and end > self.now_s
        ]

    @rule(ticks=st.integers(0, 4))
    def pass_time(self, ticks):
        self.now_s += ticks

    @rule(target=leases, key=KEYS, holder=HOLDERS, duration=DURATIONS)
    def acquire(self, key, holder, duration):
        free = not self.live(key)
        lease = self.table.acquire(key, holder, duration)
        assert (lease is not None) == free, "an ended lease never blocks, a live one always does"
        if lease is None:
            self.counts["refused_held"] += 1
            return multiple()
        earlier = [g for g, grant in self.grants.items() if grant[0] == key]
        assert all(lease.generation > generation for generation in earlier)
        assert (lease.key, lease.holder, lease.expires_at_s) == (key, holder, self.now_s + duration)
        self.grants[lease.generation] = [key, self.now_s + duration, False, False]
        return lease

    @rule(lease=leases, duration=DURATIONS)
    def renew(self, lease, duration):
        accepted = lease.generation in self.live(lease.key)
        renewed = self.table.renew(lease, duration)
        assert (renewed is not None) == accepted
        self.counts["renewed" if accepted else "rejected_stale"] += 1
        if renewed is not None:
            assert (renewed.generation, renewed.holder) == (lease.generation, lease.holder)
            assert renewed.expires_at_s == self.now_s + duration
            self.grants[lease.generation][1] = self.now_s + duration

    @rule(lease=leases)
    def release(self, lease):
        accepted = lease.generation in self.live(lease.key)
        assert self.table.release(lease) == accepted
        if accepted:
            self.grants[lease.generation][2] = True
        else:
            self.counts["rejected_stale"] += 1

    @rule()
    def expire(self):
        due = {
            g for g, (_, end, released, reported) in self.grants.items()
            if end <= self.now_s and not released and not reported
        }  # fmt: skip
        reported = self.table.expire()
        assert sorted(lease.generation for lease in reported) == sorted(due), "each ended lease, exactly once"
        for lease in reported:
            assert (lease.key, lease.expires_at_s) == tuple(self.grants[lease.generation][:2])
            self.grants[lease.generation][3] = True

    @invariant()
    def the_table_knows_what_the_list_says(self):
        for key in ("k0", "k1", "k2"):
            current = self.table.current(key)
            assert ([current.generation] if current else []) == self.live(key)
        statistics = self.table.statistics()
        grants = self.grants.values()
        assert statistics.acquired == len(self.grants)
        assert statistics.released == sum(released for _, _, released, _ in grants)
        assert statistics.expired == sum(reported for *_, reported in grants)
        assert statistics.live == sum(len(self.live(key)) for key in ("k0", "k1", "k2"))
        for name, count in self.counts.items():
            assert getattr(statistics, name) == count
        self.table.check_integrity()


TestLease = LeaseMachine.TestCase
TestLease.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
