"""``ds run``: how many ranks, with how many threads each, what they write, and why one failed."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from ds_comm.launch import LaunchResult, RankFailure, launch, python_command
from ds_comm.rank_logs import OnLine

DEFAULT_CPU_RANKS = 2
THREADS = "OMP_NUM_THREADS"


def default_num_ranks() -> int:
    """One rank per accelerator, else two on the CPU."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else DEFAULT_CPU_RANKS


def thread_variables(num_ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Threads for each rank, the cores shared out evenly, unless the user has said how many."""
    if THREADS in environment:
        return {}
    return {THREADS: str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    num_ranks: int | None = None,
    module: bool = False,
    master_port: int = 0,
    log_dir: Path | None = None,
    on_line: OnLine | None = None,
) -> int:
    """Run a script or module on several ranks of this machine, and tell on stderr how it failed.

    Args:
        script: path of a file, or a module's name.
        arguments: for it.
        num_ranks: processes; ``None`` for :func:`default_num_ranks`.
        module: whether ``script`` is a module's name.
        master_port: where the ranks meet; 0 for any free port.
        log_dir: where each rank's output is kept; ``None``: kept only when a rank fails.
        on_line: gets each line instead of this process's stdout and stderr.

    Returns:
        The exit code: 0, that of the rank that failed first, or 128 + the signal that ended it or the launch.

    Raises:
        ValueError: there is no such script, or the port is taken.
    """
    if not module and not Path(script).is_file():
        raise ValueError(f"there is no file {script}; a module needs -m before its name")
    count = default_num_ranks() if num_ranks is None else num_ranks
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    variables = thread_variables(count)
    if variables and on_line is None:
        threads = variables[THREADS]
        console.print(f"ds run: {count} ranks, {THREADS}={threads} each; set it to choose", style="dim")
    folder = log_dir or Path(tempfile.mkdtemp(prefix="ds-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = launch(
        python_command(script, arguments, module=module),
        num_ranks=count,
        log_dir=folder,
        variables=variables,
        master_port=master_port,
        on_line=on_line or _show_line,
    )
    if log_dir is None and not (result.failures and not result.stopped_by):
        shutil.rmtree(folder, ignore_errors=True)
    _explain(result, folder, console)
    return result.exit_code


def _show_line(rank: int, stream: str, line: str) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(f"[rank {rank}] {line}\n")
    target.flush()


def _explain(result: LaunchResult, folder: Path, console: Console) -> None:
    if result.stopped_by:
        console.print(f"ds run: stopped by {result.stopped_by}; all ranks have ended", style="yellow")
        return
    if not result.failures:
        return
    first, *others = result.failures
    console.print(f"ds run: rank {first.rank} failed first: it {_how(first)}", style="bold red")
    if first.last_lines:
        console.print("ds run: the last lines of its stderr:")
    for line in first.last_lines:
        console.print(f"  | {line}")
    for failure in others:
        console.print(f"ds run: then rank {failure.rank} {_how(failure)}")
    console.print(f"ds run: what the ranks wrote is in {folder}", style="dim")


def _how(failure: RankFailure) -> str:
    if failure.asked:
        return f"was ended by ds run ({failure.signal_name or f'exit code {failure.exit_code}'})"
    if failure.signal_name:
        return f"was ended by {failure.signal_name}"
    return f"ended with exit code {failure.exit_code}"
