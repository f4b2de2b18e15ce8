"""`python -m kvstrata.serve_pd.guarded PARENT COMMAND...`: become COMMAND, and end when PARENT does.

A launcher that is killed cannot end its engines; the kernel does it then. This is a program of its own: the
kernel must be asked in the child, where a parent that has threads must not run Python before the new program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by the command; exits with status 1 if the parent is gone already."""
    parent, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
