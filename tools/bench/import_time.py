"""How long imports take: `ds` beyond the bare interpreter, `ds_zero` and a peer beyond torch.

    uv run python tools/bench/import_time.py [--quick] [--json FILE]

Every sample is a fresh interpreter; systems take turns, and medians are compared. CPU seconds and the number
of modules hold on a busy machine, wall time does not. DeepSpeed is measured when it is installed
(``uv run --isolated --group peers ...``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One import: measured beyond what ``before`` costs, against ``limit_s`` where one is set."""

    system: str
    name: str
    statement: str
    before: str
    limit_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One fresh interpreter: seconds of wall and CPU time, modules loaded."""

    wall_s: float
    cpu_s: float
    num_modules: int


CASES = [
    Case(system="ds", name="beyond the interpreter", statement="import ds", before="pass", limit_s=0.05),
    Case(system="ds_spec", name="beyond the interpreter", statement="import ds_spec", before="pass"),
    Case(
        system="ds_zero", name="beyond torch", statement="import ds_zero", before="import torch", limit_s=0.3
    ),
    Case(system="deepspeed", name="beyond torch", statement="import deepspeed", before="import torch"),
]
METRICS = {"wall": "s", "cpu": "s", "modules": "count"}


def sample(code: str) -> Sample:
    """Run ``code`` in a fresh interpreter.

    Raises:
        RuntimeError: it failed; the text is its last line of stderr.
    """
    cpu_before_s = children_cpu_s()
    began_s = time.perf_counter()
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(len(sys.modules))"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - began_s
    if child.returncode != 0:
        raise RuntimeError((child.stderr.strip().splitlines() or ["no output"])[-1])
    num_modules = int(child.stdout.splitlines()[-1])
    return Sample(wall_s=wall_s, cpu_s=children_cpu_s() - cpu_before_s, num_modules=num_modules)


def children_cpu_s() -> float:
    """Return the CPU seconds of all children that have ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(cases: list[Case], *, rounds: int) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Sample every piece of code in turns; return samples by code, and the error of code that cannot run."""
    codes = list(dict.fromkeys(code for case in cases for code in (case.before, both(case))))
    samples: dict[str, list[Sample]] = {code: [] for code in codes}
    errors: dict[str, str] = {}
    # One round more than counted: the first fills the file cache and writes bytecode.
    for number in track(range(rounds + 1), description="rounds", console=Console(stderr=True)):
        for code in codes:
            if code in errors:
                continue
            try:
                taken = sample(code)
            except RuntimeError as error:
                errors[code] = str(error)
                continue
            if number > 0:
                samples[code].append(taken)
    return samples, errors


def both(case: Case) -> str:
    """Return the code whose cost is that of ``before`` and of the import."""
    return f"{case.before}\n{case.statement}"


def medians(samples: list[Sample]) -> dict[str, float]:
    """Return the median of every metric."""
    return {
        "wall": statistics.median(one.wall_s for one in samples),
        "cpu": statistics.median(one.cpu_s for one in samples),
        "modules": statistics.median(one.num_modules for one in samples),
    }


def rows_of(cases: list[Case], samples: dict[str, list[Sample]], errors: dict[str, str]) -> list[dict]:
    """Return one row per system and metric in the common form of the benchmarks."""
    extra: dict[str, dict[str, float]] = {}
    for case in cases:
        if both(case) not in errors and case.before not in errors:
            whole, start = medians(samples[both(case)]), medians(samples[case.before])
            extra[case.system] = {metric: whole[metric] - start[metric] for metric in METRICS}
    rows: list[dict] = []
    for case in cases:
        row = {"system": case.system, "case": case.name}
        if case.system not in extra:
            rows.append({**row, "error": errors.get(both(case)) or errors[case.before]})
            continue
        peer = (
            extra.get("deepspeed") if case.before == "import torch" and case.system != "deepspeed" else None
        )
        for metric, unit in METRICS.items():
            value = extra[case.system][metric]
            limit = case.limit_s if unit == "s" else None
            rows.append(
                {
                    **row,
                    "metric": metric,
                    "value": round(value, 4),
                    "unit": unit,
                    "ratio_to_best_peer": round(peer[metric] / value, 2) if peer and value > 0 else None,
                    "ratio_to_limit": round(limit / value, 2) if limit and value > 0 else None,
                }
            )
    return rows


def table_of(rows: list[dict]) -> Table:
    """Return the rows as a table for people: a line per system, ratios behind the values."""
    table = Table("system", *METRICS, title="Import cost beyond the interpreter or torch")
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        if "error" in own[0]:
            table.add_row(system, own[0]["error"])
            continue
        table.add_row(system, *(cell(row) for row in own))
    return table


def cell(row: dict) -> str:
    """Return value and unit, and by what factor it is better than the peer and the limit."""
    text = f"{row['value']:g}" + ("" if row["unit"] == "count" else f" {row['unit']}")
    for name, what in (("ratio_to_best_peer", "peer"), ("ratio_to_limit", "limit")):
        if row[name] is not None:
            text += f", {what} {row[name]:g}x"
    return text


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 11")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    rows = rows_of(CASES, *measure(CASES, rounds=3 if arguments.quick else 11))
    Console().print(table_of(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"case": "import_time", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
