"""The first moments of a launched rank: die with the launcher, write into files, become the user's program.

Run as a script by path: ``python -I -S rank_start.py PID FOLDER NAME=VALUE ... -- PROGRAM ARGUMENT ...``.
Imports nothing but the standard library, so that it costs some milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def log_name(rank: int | str, stream: str) -> str:
    """File that takes a rank's ``stdout`` or ``stderr``."""
    return f"rank-{rank}.{stream}.log"


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL when the launcher dies, set variables, and replace this process.

    Args:
        arguments: the launcher's pid, a folder, ``NAME=VALUE`` pairs, ``--``, the program and its arguments.
    """
    end = arguments.index("--")
    launcher, folder, *variables = arguments[:end]
    program = arguments[end + 1 :]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit(128 + signal.SIGKILL)  # the launcher died before the kernel was asked
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(folder, log_name(os.environ["RANK"], stream))
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644), descriptor)
    for variable in variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
