"""What tests of both machines of remote read share: a clock that tests set, and the log of actions."""

from kvstrata.remote.protocol.actions import Send
from kvstrata.remote.protocol.messages import Hello

LEASE_S = 8.0
RESEND_S = 0.5
OPEN_WAIT_S = 30.0
WAIT_S = 60.0
FIRST, END = 2, 5
LAYERS = (0, 1)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def hello_of(epoch="p1", **fields):
    """A producer's Hello; the machines look at epoch and lease only."""
    fields = {"version": 1, "rank": 0, "tp_size": 1, "lease_s": LEASE_S} | fields
    return Hello(epoch=epoch, components=(), places=(), offers=(), **fields)


class End:
    """What both sides have in common."""

    def __init__(self):
        self.clock = Clock()
        self.log = []

    def take(self):
        """New actions, in order; messages stand for their Send."""
        self.machine.check_integrity()
        actions = self.machine.take_actions()
        self.log += actions
        return [action.message if isinstance(action, Send) else action for action in actions]

    def kinds(self):
        """The types of new actions and messages."""
        return [type(action) for action in self.take()]

    def to(self, peer):
        """Types of new messages to one peer."""
        actions = self.machine.take_actions()
        self.log += actions
        return [type(a.message) for a in actions if isinstance(a, Send) and a.peer == peer]

    def wait(self, seconds):
        """Let time pass, ticking whenever the machine asks for it."""
        end_s = self.clock.now_s + seconds
        for _ in range(10_000):
            due_s = self.machine.next_tick_s()
            if due_s is None or due_s > end_s:
                break
            self.clock.now_s = max(self.clock.now_s, due_s)
            self.machine.tick()
            self.machine.check_integrity()
        else:
            raise AssertionError(f"it never rests: next tick at {due_s}, now {self.clock.now_s}")
        self.clock.now_s = end_s

    def dropped(self):
        return self.machine.statistics().dropped
