"""The ways to gather and to reduce-scatter over gloo, timed: why ds_comm.wire moves bytes as it does.

Usage: OMP_NUM_THREADS=1 uv run python tools/bench/gloo_moves.py [--ranks 2] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ds_comm.testing import run_ranks

SIZES_MIB = (1, 16, 64)
REPEATS = 7


def moves(flat: torch.Tensor, scratch: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Name -> one complete move of ``flat`` among the ranks of the default group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    slices, received = flat.chunk(world_size), scratch.chunk(world_size)

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def pairwise(parts: Any, targets: Any) -> None:
        others = [(rank + step) % world_size for step in range(1, world_size)]
        takes = [dist.irecv(targets[other], other) for other in others]
        sends = [dist.isend(parts(other), other) for other in others]
        wait([*takes, *sends])

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    own = slices[rank]
    return {
        "gather: gloo's own": lambda: gather(scratch, own) and None,
        "gather: one broadcast per owner, in place": lambda: wait(
            [dist.broadcast(part, source, async_op=True) for source, part in enumerate(slices)]
        ),
        "gather: send and receive, in place": lambda: pairwise(lambda other: own, slices),
        "reduce-scatter: gloo's own": lambda: reduce(received[rank], flat) and None,
        "reduce-scatter: all-to-all, sum not counted": lambda: dist.all_to_all_single(scratch, flat) and None,
        "reduce-scatter: send and receive, sum not counted": lambda: pairwise(
            lambda other: slices[other], received
        ),
        "all-reduce: gloo's own": lambda: dist.all_reduce(flat) and None,
    }


def measure(size_mib: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of every move on this rank; for :func:`run_ranks`.

    Collective: every rank.
    """
    numel = size_mib * 2**20 // 4
    flat, scratch = torch.randn(numel), torch.zeros(numel)
    results = {}
    for name, move in moves(flat, scratch).items():
        move()
        walls, cpus = [], []
        for _ in range(REPEATS):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            move()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        results[name] = (statistics.median(walls), statistics.median(cpus))
    return results


def main() -> None:
    """Measure all sizes, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title=f"{options.ranks} ranks, medians of {REPEATS}, ms wall / ms CPU of rank 0")
    table.add_column("move")
    rows = []
    columns = []
    for size in SIZES_MIB:
        table.add_column(f"{size} MiB", justify="right")
        columns.append(run_ranks(measure, options.ranks, size, timeout_s=300.0)[0])
        for name, (wall, cpu) in columns[-1].items():
            for metric, value in (("wall", wall), ("cpu", cpu)):
                rows.append(
                    {"system": name, "case": f"{size} MiB", "metric": metric, "value": value, "unit": "s"}
                )
    for name in columns[0]:
        table.add_row(
            name, *(f"{column[name][0] * 1e3:.1f} / {column[name][1] * 1e3:.1f}" for column in columns)
        )
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps({"case": "gloo_moves", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
