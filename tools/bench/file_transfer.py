"""Swap files beside peers, and how the disk is best asked: threads or io_uring, large or small pages.

    uv run --group bench python tools/bench/file_transfer.py [--quick] [--json FILE] [--markdown FILE]
        [--dir DIR]

Systems in turn, medians over rounds; every file is written over before it is timed. Cases:

- files: as in ``offload.py``: one file beside DeepSpeed's operator and torch.
- access: one file, MB/s and CPU milliseconds per GB. fio has the same access as ds: unbuffered, blocks of
  8 MiB, memory in large pages; its best row is the limit. ``depth`` is how many blocks are under way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measured_table import MeasuredTable, medians, parser_of
from offload import measure_files

from ds_zero.swap_store import BLOCK_BYTES, SwapStore

FORMATS = {
    "write": ("MB/s", "{:.0f}", False),
    "read": ("MB/s", "{:.0f}", False),
    "write CPU": ("ms/GB", "{:.0f}", True),
    "read CPU": ("ms/GB", "{:.0f}", True),
}
# glibc then asks for large pages, as ds does for its buffers; fio has no option for that.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LARGE_PAGE_BYTES = 2 << 20
SMALL_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
# Two threads with a half of the file each.
TWO_THREADS = ("--ioengine=psync", "--numjobs=2", "--thread", "--offset_increment=50%", "--io_size=50%")

Values = dict[str, float]
Measure = Callable[[Path, int], Values]


def fio(*arguments: str, environment: dict[str, str] = LARGE_PAGES) -> Measure:
    """A measurement by fio with these arguments beside those that all have in common."""

    def measure(folder: Path, num_bytes: int) -> Values:
        if shutil.which("fio") is None:
            raise RuntimeError("fio is not installed")
        values: Values = {}
        for kind in ("write", "write", "read"):
            command = ["fio", "--name=x", f"--filename={folder / 'fio.bin'}", f"--size={num_bytes}"]
            command += [
                "--direct=1",
                f"--bs={BLOCK_BYTES}",
                f"--rw={kind}",
                f"--iomem_align={LARGE_PAGE_BYTES}",
            ]
            command += ["--group_reporting", "--output-format=json", *arguments]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=os.environ | environment
            )
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["fio failed"])[-1])
            job = json.loads(done.stdout)["jobs"][0]
            values[kind] = job[kind]["bw_bytes"] / 1e6
            cpu_ms = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"]
            values[f"{kind} CPU"] = cpu_ms / (num_bytes / 1e9)
        return values

    return measure


def swap(*, num_threads: int) -> Measure:
    """A measurement of the swap store."""

    def measure(folder: Path, num_bytes: int) -> Values:
        store = SwapStore(folder, rank=0, num_threads=num_threads)
        store.create("x", num_bytes)
        buffer = store.buffer(num_bytes, torch.uint8).random_(0, 255)
        values: Values = {}
        for name, move in (
            ("write", store.write_async),
            ("write", store.write_async),
            ("read", store.read_async),
        ):
            values |= timed(name, num_bytes, lambda move=move: move("x", buffer).wait())
        store.close()
        return values

    return measure


def buffered(folder: Path, num_bytes: int) -> Values:
    """Plain writes and fsync; the read comes from the disk, as the page cache is asked to forget the file."""
    data = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
    path = folder / "plain.bin"

    def write() -> None:
        for start in range(0, num_bytes, BLOCK_BYTES):
            os.pwrite(descriptor, data, start)
        os.fsync(descriptor)

    def read() -> None:
        for start in range(0, num_bytes, BLOCK_BYTES):
            os.preadv(descriptor, [data], start)

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        write()
        values = timed("write", num_bytes, write)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return values | timed("read", num_bytes, read)
    finally:
        os.close(descriptor)
        path.unlink()


def timed(name: str, num_bytes: int, action: Callable[[], None]) -> Values:
    """Speed of an action and its CPU time in all threads of this process."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    action()
    wall_s, used_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    return {name: num_bytes / 1e6 / wall_s, f"{name} CPU": used_s * 1e3 / (num_bytes / 1e9)}


SYSTEMS: dict[str, Measure] = {
    "ds, 2 threads": swap(num_threads=2),
    "ds, 1 thread": swap(num_threads=1),
    "ds, 4 threads": swap(num_threads=4),
    "fio, 2 threads": fio(*TWO_THREADS),
    "fio, 2 threads, small pages": fio(*TWO_THREADS, environment=SMALL_PAGES),
    "fio, io_uring, depth 1": fio("--ioengine=io_uring", "--iodepth=1"),
    "fio, io_uring, depth 2": fio("--ioengine=io_uring", "--iodepth=2"),
    "fio, io_uring, depth 8": fio("--ioengine=io_uring", "--iodepth=8"),
    "fio, libaio, depth 8": fio("--ioengine=libaio", "--iodepth=8"),
    "plain buffered, fsync": buffered,
}


def measure_access(table: MeasuredTable, folder: Path, *, num_bytes: int, rounds: int) -> None:
    """All of ``SYSTEMS`` in turn."""
    case = f"access, {num_bytes / 1e6:.0f} MB"
    runs: dict[str, list[Values]] = {}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, measure in SYSTEMS.items():
            try:
                runs.setdefault(name, []).append(measure(folder, num_bytes))
            except (RuntimeError, OSError) as error:
                errors[name] = str(error)
    found = {name: medians(taken) for name, taken in runs.items() if taken}
    bounds = [values for name, values in found.items() if name.startswith("fio")]
    limit = {
        metric: (min if less else max)(values[metric] for values in bounds)
        for metric, (_, _, less) in FORMATS.items()
        if bounds
    }
    for name, values in found.items():
        table.add(case, name, values, limit=limit)
    for name, error in errors.items():
        if name not in found:
            table.fail(case, name, error)


def main() -> int:
    """Measure, and show or write what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default the working folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = MeasuredTable("file_transfer", FORMATS)
    num_bytes, rounds = (64 << 20, 1) if options.quick else (512 << 20, 5)
    with tempfile.TemporaryDirectory(dir=options.dir or Path.cwd()) as folder:  # /tmp may be memory
        measure_files(table, Path(folder), num_bytes=num_bytes, rounds=rounds)
        measure_access(table, Path(folder), num_bytes=num_bytes, rounds=rounds)
    table.finish(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
