"""The parts that a consumer is offered, and the members that offer them: what fits, and what does not."""

import re

import pytest
from remote_consumer_end import done, expected, land_everything, receiving
from remote_end import END

from kvstrata.remote.protocol.actions import CancelReads, Ending, StartRead
from kvstrata.remote.protocol.messages import Abort, Hello, Open, ReadDone, ReadFailed, Ready, Reject, Welcome


def test_a_lost_answer_is_given_again_also_after_the_end():
    end = receiving()
    end.hear(0, Ready)
    end.machine.read_finished(0)
    end.take()
    end.hear(0, Ready)
    assert end.kinds() == [ReadDone]
    after = done()
    after.hear(0, Ready, layer=1)
    (answer,) = after.take()
    assert (type(answer), answer.layer) == (ReadDone, 1)
    after.hear(0, Open)
    assert after.kinds() == []
    assert after.dropped() == {"late": 2}


@pytest.mark.parametrize(
    ("ready", "problem"),
    [
        ({"layer": 9}, "decode expects no such layer"),
        ({"first_block": 1}, r"the transfer has blocks 2\.\.5"),
        ({"end_block": 6}, r"the transfer has blocks 2\.\.5"),
        ({"first_block": 4, "end_block": 3, "blocks": ()}, r"the transfer has blocks 2\.\.5"),
        ({"blocks": (1, 2)}, "2 block ids"),
        ({"first_block": 3}, "it should begin at block 2"),
        ({"end_block": 4, "is_last": True}, "it should end at block 5"),
        ({"part": 1 << 40, "first_block": 3}, "at most 1048576 parts"),
    ],
)
def test_a_part_that_does_not_fit_fails_the_transfer(ready, problem):
    end = receiving()
    end.hear(0, Ready, **ready)
    (failed, abort, finish) = end.take()
    assert (type(failed), failed.layer) == (ReadFailed, ready.get("layer", 0))
    assert (type(abort), abort.member) == (Abort, 1)
    assert finish.ending is Ending.FAILED

    assert re.search(problem, finish.reason), finish.reason
    assert end.dropped() == {"contradiction": 1}


@pytest.mark.parametrize(
    ("before", "ready", "problem"),
    [
        ({"end_block": 4}, {"part": 1, "first_block": 3}, "it should begin at block 4"),
        ({"part": 1, "first_block": 4}, {"part": 0, "end_block": 3}, "it should end at block 4"),
        ({"end_block": 4}, {"end_block": 4, "blocks": (7, 7)}, "other blocks before"),
        ({"end_block": 4}, {"end_block": 3}, "other blocks before"),
        (
            {},
            {"part": 1, "first_block": END, "blocks": (), "is_last": False},
            "part 0 was said to be the last",
        ),
        (
            {"part": 2, "first_block": 4, "end_block": 4, "is_last": False},
            {"part": 1, "first_block": 3},
            "said to be the last, but there was part 2",
        ),
    ],
)
def test_parts_that_contradict_each_other_fail_the_transfer(before, ready, problem):
    end = receiving()
    end.hear(0, Ready, **before)
    end.hear(0, Ready, **ready)
    assert end.kinds() == [StartRead, CancelReads]
    end.machine.read_finished(0)
    assert problem in end.finished()["t"].reason


@pytest.mark.parametrize(
    ("opened", "problem"),
    [
        ({"first_block": 0}, "blocks 0..5 at prefill, 2..5 at decode"),
        ({"end_block": 6}, "blocks 2..6 at prefill, 2..5 at decode"),
        ({"members": 3}, "3 members says member 1, 2 said others"),
        ({"hold_slot": 1 << 40}, "is no hold"),
        ({"generation": 0}, "is no hold"),
    ],
)
def test_an_open_that_contradicts_what_is_expected_fails_with_both_values(opened, problem):
    end = receiving(0)
    end.hear(1, Hello)
    end.take()
    end.hear(1, Open, **opened)
    reject, abort, finish = end.take()
    assert (type(reject), reject.member) == (Reject, 1)
    assert (type(abort), abort.member) == (Abort, 0)
    assert problem in reject.reason
    assert problem in finish.reason


def test_a_member_beyond_the_members_is_refused():
    end = expected()
    end.hear(1, Open, members=1)
    assert "member 1 of 1" in end.finished()["t"].reason


def test_one_producer_is_not_two_members():
    end = receiving(0)
    end.hear(0, Open, member=1, generation=70)
    assert "members 0 and 1 are one producer" in end.finished()["t"].reason


def test_a_second_producer_in_a_members_place_is_rejected_and_harms_nobody():
    end = receiving()
    end.hear(7, Hello)
    end.hear(7, Open, member=0)
    end.hear(0, Open, generation=70)
    assert end.kinds() == [Welcome, Reject, Reject]
    assert end.dropped() == {"conflict": 2}
    land_everything(end)
    assert end.finished()["t"].ending is Ending.DONE
