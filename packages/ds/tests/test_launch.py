"""``ds run`` with real processes: what a failing rank leaves on the screen, in the exit code, and running."""

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ds.launch import DEFAULT_CPU_RANKS, default_num_ranks, run_script, thread_variables

WAIT_S = 170

PROGRAM = """
import os, signal, subprocess, sys, threading

rank = int(os.environ["RANK"])
how = sys.argv[1]
children = []
if "children" in how:
    for detached in (False, True):
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        code = [sys.executable, "-c", f"import signal; {ignore}; print(flush=True); signal.pause()"]
        child = subprocess.Popen(code, start_new_session=detached, stdout=subprocess.PIPE)
        child.stdout.readline()
        children.append(child.pid)
if "stubborn" in how:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
print("pids", os.getpid(), *children, flush=True)
if "together" in how:
    # Ranks fail only once all have said their pids.
    marker = sys.argv[2]
    open(f"{marker}-{rank}", "w").close()
    while not all(os.path.exists(f"{marker}-{peer}") for peer in range(int(os.environ["WORLD_SIZE"]))):
        threading.Event().wait(0.01)
if rank == 1:
    if "exit3" in how:
        sys.stderr.write("the reason\\n")
        sys.exit(3)
    if "raise" in how:
        raise ValueError("a wrong turn")
    if "sigkill" in how:
        os.kill(os.getpid(), signal.SIGKILL)
if "blames" in how and rank == 0:
    raise RuntimeError("ds_comm.errors.PeerLostError: rank 1 is gone")
if "end" not in how:
    while True:
        signal.pause()
"""

COMMAND = """
import os, sys, tempfile
from ds.cli import main

for pipe, descriptor in ((out, 1), (err, 2)):
    os.dup2(pipe.fileno(), descriptor)
    pipe.close()
os.environ.pop("OMP_NUM_THREADS", None)
sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
sys.argv = ["ds", *arguments]
tempfile.tempdir = folder  # where logs of failed launches stay
main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


class Launch:
    """``ds run`` in a process of a fork server that has torch loaded already; writes into two pipes."""

    def __init__(self, program: Path, how: str, *, nproc: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ds.launch", "ds.cli"])
        out, out_end = context.Pipe(duplex=False)
        err, err_end = context.Pipe(duplex=False)
        arguments = ["run", "--nproc", str(nproc), str(program), how, str(program.parent / "marker")]
        command = program.parent / "command.py"
        command.write_text(COMMAND)
        # The child cannot import this file by name.
        known = {
            "arguments": arguments,
            "out": out_end,
            "err": err_end,
            "folder": str(program.parent),
        }
        self.process = context.Process(target=runpy.run_path, args=(str(command), known))
        self.process.start()
        out_end.close()
        err_end.close()
        self.out = os.fdopen(os.dup(out.fileno()))
        self.err = os.fdopen(os.dup(err.fileno()))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, and what is left of stdout and stderr."""
        with self.out, self.err:
            said = self.out.read(), self.err.read()
        self.process.join(WAIT_S)
        return self.process.exitcode, *said


def ran(program: Path, how: str, *, nproc: int = 2) -> tuple[int, str, str, list[psutil.Process]]:
    """Exit code, stdout and stderr of a launch, and its processes that are still there."""
    code, out, err = Launch(program, how, nproc=nproc).finish()
    return code, out, err, running(out)


def running(out: str) -> list[psutil.Process]:
    pids = [int(pid) for line in re.findall(r"pids ([\d ]+)", out) for pid in line.split()]
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            continue
        if process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    assert pids
    return found


def test_all_well(program: Path) -> None:
    code, out, err, left = ran(program, "end", nproc=3)
    assert (code, left) == (0, [])
    assert list(program.parent.glob("ds-run-*")) == []
    assert sorted(re.findall(r"^\[rank (\d)\] pids", out, re.MULTILINE)) == ["0", "1", "2"]
    assert re.fullmatch(r"ds run: 3 ranks, OMP_NUM_THREADS=\d+ each; set it to choose\n", err)


def test_exit_code_and_last_words_of_the_failing_rank(program: Path) -> None:
    code, _, err, left = ran(program, "together exit3")
    assert (code, left) == (3, [])
    assert "rank 1 failed first: it ended with exit code 3" in err
    assert "| the reason" in err
    assert "rank 0 was ended by ds run (SIGTERM)" in err
    [folder] = program.parent.glob("ds-run-*")
    assert f"what the ranks wrote is in {folder}" in err
    assert (folder / "rank-1.stderr.log").read_text() == "the reason\n"


def test_an_exception_is_shown(program: Path) -> None:
    code, _, err, left = ran(program, "together raise")
    assert (code, left) == (1, [])
    assert "| ValueError: a wrong turn" in err


def test_a_killed_rank(program: Path) -> None:
    code, _, err, left = ran(program, "together sigkill")
    assert (code, left) == (128 + signal.SIGKILL, [])
    assert "rank 1 failed first: it was ended by SIGKILL" in err


def test_the_cause_comes_before_ranks_that_failed_of_it(program: Path) -> None:
    code, _, err, left = ran(program, "together exit3 blames")
    assert (code, left) == (3, [])
    assert "rank 1 failed first" in err
    assert "then rank 0 ended with exit code 1" in err


def test_stubborn_ranks_and_what_they_started_end(program: Path) -> None:
    code, out, err, left = ran(program, "together children stubborn exit3")
    assert (code, left) == (3, [])
    assert "rank 0 was ended by ds run (SIGKILL)" in err
    assert len(re.findall(r"pids \d+ \d+ \d+", out)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("how", ["", "children stubborn"], ids=["ranks that obey", "ranks that do not"])
def test_a_stopped_launch_leaves_nothing(program: Path, number: signal.Signals, how: str) -> None:
    launch = Launch(program, how)
    said = launch.out.readline() + launch.out.readline()
    launch.send(number)
    if how:
        launch.send(number)  # an impatient user
    code, out, err = launch.finish()
    assert code == 128 + number, err
    assert f"stopped by {number.name}" in err
    assert list(program.parent.glob("ds-run-*")) == []
    assert running(said + out) == []


def test_ranks_die_with_a_killed_launcher(program: Path) -> None:
    launch = Launch(program, "stubborn")
    said = launch.out.readline() + launch.out.readline()
    launch.send(signal.SIGKILL)
    code, _, _ = launch.finish()
    assert code == -signal.SIGKILL
    _, alive = psutil.wait_procs(running(said), timeout=WAIT_S)
    assert alive == []


def test_the_command_itself(program: Path) -> None:
    command = [sys.executable, "-m", "ds", "run", "--nproc", "2", str(program), "together exit3"]
    result = subprocess.run(
        [*command, str(program.parent / "marker")],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "TMPDIR": str(program.parent)},
    )
    assert result.returncode == 3
    assert "[rank 1] the reason" in result.stderr
    assert running(result.stdout) == []


def test_threads_are_shared_out_unless_the_user_says() -> None:
    cores = len(os.sched_getaffinity(0))
    assert thread_variables(cores, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_variables(1, {}) == {"OMP_NUM_THREADS": str(cores)}
    assert thread_variables(64 * cores, {}) == {"OMP_NUM_THREADS": "1"}
    assert thread_variables(1, {"OMP_NUM_THREADS": "5"}) == {}


def test_default_is_a_rank_per_accelerator_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_num_ranks() == DEFAULT_CPU_RANKS
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
    assert default_num_ranks() == 5


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nothing\.py"):
        run_script(str(tmp_path / "nothing.py"), [])


def test_logs_are_kept_where_asked(program: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    lines = []
    code = run_script(
        str(program), ["end"], num_ranks=2, log_dir=logs, on_line=lambda *line: lines.append(line)
    )
    assert code == 0
    assert sorted(path.name for path in logs.glob("*.stdout.log")) == [
        "rank-0.stdout.log",
        "rank-1.stdout.log",
    ]
    assert sorted(rank for rank, stream, line in lines if stream == "stdout" and "pids" in line) == [0, 1]
