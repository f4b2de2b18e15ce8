"""For tests: imported once by the process that the sides' processes are forked from.

Everything is imported and compiled here, so that a side starts in no time.
"""

from kvstrata.remote.testing import sides
from kvstrata.remote.transports.loops import prepare

__all__ = ["sides"]

prepare()
