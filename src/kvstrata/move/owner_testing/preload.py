"""For tests: imported once by the process that the ranks' processes are forked from.

Everything is imported and compiled here, so that a rank starts in no time.
"""

from kvstrata.move.memcpy import prepare
from kvstrata.move.owner_testing import processes

__all__ = ["processes"]

prepare()
