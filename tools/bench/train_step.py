"""A training step of ds beside its peers: time, traffic and memory on two CPU ranks over gloo.

Usage: uv run --group bench python tools/bench/train_step.py [--quick] [--json FILE] [--rounds N]

Systems run one after another in fresh processes, in rounds, so that a slow minute hits all of them; medians
are reported. "no communication" is the same step with every rank for itself: the limit.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parent
RANKS = 2
LIMIT = "no communication"
SYSTEMS = [LIMIT, "ds stage 0", "ds stage 1", "ds stage 2", "ds stage 3", "DDP", "ZeroRedundancyOptimizer", "FSDP2"]
SYSTEMS += ["DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3"]
QUICK_CASES = [("27M", "small", "fp32")]
CASES = [*QUICK_CASES, ("27M", "large", "fp32"), ("27M", "small", "bf16"), ("110M", "small", "fp32")]
METRICS = {
    "wall": "s",
    "cpu": "s",
    "exposed": "s",
    "tokens": "1/s",
    "traffic": "bytes per parameter",
    "peak": "bytes",
}
LOWER_IS_BETTER = {"wall", "cpu", "exposed", "traffic", "peak"}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def measure(system: str, case: tuple[str, str, str], *, steps: int, limit_s: float) -> dict[str, Any]:
    """One run in fresh processes: rank 0's result, or why there is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(RANKS),
    }
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    command = [sys.executable, str(HERE / "train_step_rank.py"), system, *case, str(steps)]
    processes = [
        subprocess.Popen(  # noqa: S603 -- our own script
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return _result(processes, limit_s)
    finally:
        for process in processes:
            process.kill()
        for left in set(SHARED_MEMORY.iterdir()) - before if SHARED_MEMORY.is_dir() else ():
            with contextlib.suppress(OSError):
                left.unlink()  # DeepSpeed leaves its shared buffers


def _result(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> dict[str, Any]:
    try:
        out, err = processes[0].communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {limit_s:.0f} s"}
    for line in out.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"error": (err.strip().splitlines() or ["no output"])[-1][:200]}


def run_case(case: tuple[str, str, str], *, rounds: int, steps: int, console: Console) -> list[dict[str, Any]]:
    """Rows of one case."""
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    todo = [system for _ in range(rounds) for system in SYSTEMS]
    for system in track(todo, description=" ".join(case), console=console, disable=not console.is_terminal):
        if not any("error" in run for run in runs[system]):
            runs[system].append(measure(system, case, steps=steps, limit_s=420.0))
            if not console.is_terminal:
                console.print(f"{' '.join(case)}: {system}", highlight=False)
    return to_rows(case, runs)


def to_rows(case: tuple[str, str, str], runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over steps and rounds, beside the limit and the best peer."""
    values: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for system, results in runs.items():
        failed = [result["error"] for result in results if "error" in result]
        if failed or not results:
            rows.append({"system": system, "case": " ".join(case), "error": (failed or ["not run"])[0]})
            continue
        wall = statistics.median(second for result in results for second in result["wall_s"])
        tokens = {"small": 64, "large": 512}[case[1]] * RANKS
        values[system] = {
            "wall": wall,
            "cpu": statistics.median(second for result in results for second in result["cpu_s"]),
            "tokens": tokens / wall,
            "traffic": statistics.median(result["sent_bytes_per_parameter"] for result in results),
            "peak": statistics.median(result["peak_bytes"] for result in results),
            "loss": results[0]["loss"],
        }
    for value in values.values():
        value["exposed"] = value["wall"] - values[LIMIT]["wall"] if LIMIT in values else 0.0
    peers = [value for system, value in values.items() if not system.startswith("ds ") and system != LIMIT]
    for system, value in values.items():
        rows += [_row(system, case, metric, value, peers, values.get(LIMIT)) for metric in METRICS]
        rows.append({"system": system, "case": " ".join(case), "metric": "loss", "value": value["loss"], "unit": "nats"})
    return rows


def _row(
    system: str,
    case: tuple[str, str, str],
    metric: str,
    value: dict[str, float],
    peers: Sequence[dict[str, float]],
    limit: dict[str, float] | None,
) -> dict[str, Any]:
    lower = metric in LOWER_IS_BETTER
    best = (min if lower else max)((peer[metric] for peer in peers), default=0.0)
    bound = limit[metric] if limit is not None and metric in ("wall", "cpu", "tokens") else 0.0
    own = value[metric]

    def ratio(reference: float) -> float | None:
        if not reference or not own:
            return None
        return round(reference / own if lower else own / reference, 3)

    return {
        "system": system,
        "case": " ".join(case),
        "metric": metric,
        "value": own,
        "unit": METRICS[metric],
        "ratio_to_best_peer": ratio(best),
        "ratio_to_limit": ratio(bound),
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """One table per case."""
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        table = Table(title=f"{case}, {RANKS} ranks", title_justify="left")
        for heading in ("system", "wall", "x limit", "CPU", "x limit", "tok/s", "B/param", "peak MB", "loss"):
            table.add_column(heading, justify="left" if heading == "system" else "right")
        for system in dict.fromkeys(row["system"] for row in mine):
            table.add_row(*_cells(system, [row for row in mine if row["system"] == system]))
        console.print(table)


def _cells(system: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    if "error" in rows[0]:
        return [system, f"error: {rows[0]['error']}"]
    by_metric = {row["metric"]: row for row in rows}

    def slowdown(metric: str) -> str:
        ratio = by_metric[metric]["ratio_to_limit"]
        return f"{1 / ratio:.2f}" if ratio else "-"

    return [
        system,
        f"{by_metric['wall']['value']:.3f}",
        slowdown("wall"),
        f"{by_metric['cpu']['value']:.3f}",
        slowdown("cpu"),
        f"{by_metric['tokens']['value']:.0f}",
        f"{by_metric['traffic']['value']:.2f}",
        f"{by_metric['peak']['value'] / 1e6:.0f}",
        f"{by_metric['loss']['value']:.4f}",
    ]


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case, one round")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rounds", type=int, default=None, help="default 3, quick 1")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    options = parser.parse_args()
    console = Console(width=110)
    rounds = options.rounds or (1 if options.quick else 3)
    rows: list[dict[str, Any]] = []
    for case in QUICK_CASES if options.quick else CASES:
        rows += run_case(case, rounds=rounds, steps=options.steps, console=console)
        if options.json:
            options.json.write_text(json.dumps({"case": "train_step", "rows": rows}, indent=1))
    show(rows, console)


if __name__ == "__main__":
    main()
