"""The first moments of a launched rank: die with the launcher, then become the user's program.

Run as a script by path: ``python -I -S rank_start.py PID NAME=VALUE ... -- PROGRAM ARGUMENT ...``. Imports
nothing but the standard library, so that it costs some milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL when the launcher dies, set variables, and replace this process.

    Args:
        arguments: the launcher's pid, ``NAME=VALUE`` pairs, ``--``, the program and its arguments.
    """
    end = arguments.index("--")
    launcher, *variables = arguments[:end]
    program = arguments[end + 1 :]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit(128 + signal.SIGKILL)  # the launcher died before the kernel was asked
    os.environ.update(variable.split("=", 1) for variable in variables)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
