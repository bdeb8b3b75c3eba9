"""How the command line starts ranks: how many, with how many threads, and what to say when one fails."""

import os
from collections.abc import Sequence

from rich.console import Console

from ds_comm.launch import LaunchResult, launch, python_command

DEFAULT_CPU_RANKS = 2


def default_num_ranks() -> int:
    """One rank per accelerator, else two on the CPU."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else DEFAULT_CPU_RANKS


def run_script(script: str, arguments: Sequence[str], *, num_ranks: int | None, module: bool = False) -> int:
    """Run a script or module on several ranks of this machine.

    Args:
        script: path of a file, or a module's name.
        arguments: for it.
        num_ranks: processes; ``None`` for :func:`default_num_ranks`.
        module: whether ``script`` is a module's name.

    Returns:
        The exit code: 0, that of the rank that failed first, or 128 + the signal that ended it.
    """
    ranks = default_num_ranks() if num_ranks is None else num_ranks
    console = Console(stderr=True)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        console.print(f"ds run: {ranks} rank(s), {threads} thread(s) each (OMP_NUM_THREADS)", style="dim")
    result: LaunchResult = launch(python_command(script, arguments, module=module), num_ranks=ranks)
    if result.message:
        console.print(f"ds run: {result.message}", style="red", markup=False, highlight=False)
    return result.exit_code
