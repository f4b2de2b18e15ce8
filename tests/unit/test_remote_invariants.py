"""An invariant of remote read that is about several parts of it at once: what a done read means."""

from remote_consumer_end import ConsumerEnd, receiving

from kvstrata.remote.protocol.actions import CancelReads, Ending
from kvstrata.remote.protocol.messages import ReadDone, ReadFailed, Ready


def said(end: ConsumerEnd, kind: type) -> int:
    return end.kinds().count(kind)


def test_P3_a_part_is_said_to_be_read_only_once_all_of_it_has_landed():  # noqa: N802
    end = receiving(0, members=1, read_attempts=2)
    end.hear(0, Ready)
    (read,) = end.reads()
    end.hear(0, Ready)  # asked again meanwhile
    end.machine.tick()
    assert said(end, ReadDone) == 0
    end.machine.read_finished(read.number, "cut off after half of it")
    (again,) = end.reads()
    assert (again.first_block, again.end_block, again.blocks) == (
        read.first_block,
        read.end_block,
        read.blocks,
    )
    assert said(end, ReadDone) == 0
    end.machine.read_finished(again.number)
    assert said(end, ReadDone) == 1


def test_P3_a_part_that_never_landed_is_never_said_to_be_read():  # noqa: N802
    end = receiving(0, members=1, read_attempts=1)
    end.hear(0, Ready)
    (read,) = end.reads()
    end.machine.read_finished(read.number, "cut off after half of it")
    kinds = end.kinds()
    assert ReadFailed in kinds
    assert ReadDone not in kinds
    end.hear(0, Ready)
    assert said(end, ReadDone) == 0
    assert end.finished()["t"].ending is Ending.FAILED


def test_P3_a_read_that_lands_after_the_end_is_not_said_to_be_done():  # noqa: N802
    end = receiving(0, members=1)
    end.hear(0, Ready)
    (read,) = end.reads()
    end.machine.abort("t", "the client left")
    assert end.kinds() == [CancelReads]
    end.machine.read_finished(read.number)
    assert said(end, ReadDone) == 0
    assert end.finished()["t"].ending is Ending.ABORTED
