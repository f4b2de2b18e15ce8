"""Both machines of remote read on one clock, and messages of one kind that get lost for long."""

import pytest
from remote_end import LEASE_S
from remote_pair import Pair

from kvstrata.remote.protocol.actions import Ending
from kvstrata.remote.protocol.messages import Beat, Ready


@pytest.mark.parametrize("leases", [0.3, 0.99, 1.0, 1.7, 5.0, 20.0])
@pytest.mark.parametrize("layers_before", [(), (0,)], ids=["nothing read", "one layer read"])
def test_no_loss_of_ready_alone_ends_a_transfer_however_long_it_lasts(leases, layers_before):
    pair = Pair()
    pair.expect()
    pair.open()
    pair.publish(layers=layers_before)
    pair.wait(0.4 * LEASE_S)
    until_s = pair.clock.now_s + leases * LEASE_S
    pair.is_lost = lambda message, now_s: isinstance(message, Ready) and now_s < until_s
    pair.publish(layers=[layer for layer in (0, 1) if layer not in layers_before])
    pair.wait(leases * LEASE_S - 0.01)
    assert (pair.finished, pair.settled) == ({}, {})
    assert len(pair.lost) > 1
    # Repeated at the latest after a quarter of a lease.
    pair.wait(LEASE_S / 4 + 0.02)
    assert pair.finished["t"].ending is Ending.DONE
    assert pair.settled["t"].ending is Ending.DONE


def test_the_same_loss_without_beats_ends_it_after_a_lease():
    pair = Pair(is_lost=lambda message, now_s: isinstance(message, Ready | Beat))
    pair.expect()
    pair.open()
    pair.publish()
    pair.wait(0.99 * LEASE_S)
    assert pair.finished == {}
    pair.wait(0.02 * LEASE_S)
    assert pair.finished["t"].ending is Ending.LAPSED
    assert pair.finished["t"].reason == "member 0 of prefill said nothing of the transfer for 8 s"
