"""From the runs of train_step.py to rows in the common form and tables, and the check of the losses."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rank_group import GroupResult
from rich.table import Table
from training_cases import SYSTEMS, WORLD_SIZE, Case, System

Row = dict[str, Any]
# Unit, and whether less is better; None where there is no better.
METRICS: dict[str, tuple[str, bool | None]] = {
    "cpu_s_per_step": ("s", True),
    "wall_s_per_step": ("s", True),
    "exposed_s_per_step": ("s", True),
    "tokens_per_s": ("1/s", False),
    "peak_bytes": ("bytes", True),
    "traffic_per_parameter": ("bytes", True),
    "traffic_per_parameter_by_events": ("bytes", None),
    "loss_last": ("nats", None),
}
TIMES = ("cpu_s_per_step", "wall_s_per_step", "tokens_per_s")
# Sums in another order, magnified by a few steps of AdamW; in bf16 systems also round in different places.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One system in one round: the ranks' measurements as one."""

    values: dict[str, float]
    loss_first: float


def summarize(result: GroupResult, case: Case) -> Run:
    """Slowest rank's wall time, average CPU time, fullest rank's memory, average traffic of a rank."""
    ranks = result.results
    wall_s = max(statistics.median(rank.wall_s) for rank in ranks)
    sent_bytes = result.loopback_bytes / case.num_steps / WORLD_SIZE
    values = {
        "cpu_s_per_step": statistics.mean(rank.cpu_s for rank in ranks) / case.num_steps,
        "wall_s_per_step": wall_s,
        "tokens_per_s": WORLD_SIZE * case.batch_size * case.length / wall_s,
        "peak_bytes": max(rank.peak_bytes for rank in ranks),
        "traffic_per_parameter": sent_bytes / ranks[0].num_parameters,
        "loss_last": statistics.mean(rank.losses[-1] for rank in ranks),
    }
    if ranks[0].event_bytes is not None:
        by_events = statistics.mean(rank.event_bytes for rank in ranks) / ranks[0].num_parameters
        values["traffic_per_parameter_by_events"] = by_events
    return Run(values=values, loss_first=statistics.mean(rank.losses[0] for rank in ranks))


def rows_of(case: Case, runs: Mapping[str, Sequence[Run]], errors: Mapping[str, str]) -> list[Row]:
    """Medians over rounds in the common form; peers are compared with among those of the same stage."""
    medians = {
        name: {metric: statistics.median(run.values[metric] for run in taken) for metric in taken[0].values}
        for name, taken in runs.items()
        if taken and name not in errors
    }
    limit = next((medians[s.name] for s in SYSTEMS if s.stage is None and s.name in medians), None)
    for values in medians.values():
        if limit is not None:
            values["exposed_s_per_step"] = values["wall_s_per_step"] - limit["wall_s_per_step"]
    rows: list[Row] = []
    for system in SYSTEMS:
        if system.name in errors:
            rows.append({"system": system.name, "case": case.name, "error": errors[system.name]})
        elif system.name in medians:
            peers = [medians[s.name] for s in _peers_of(system) if s.name in medians]
            rows += _rows_of_system(system, case, medians[system.name], peers, limit)
    return rows


def _peers_of(system: System) -> list[System]:
    return [] if system.is_peer else [s for s in SYSTEMS if s.is_peer and s.stage == system.stage]


def _rows_of_system(
    system: System,
    case: Case,
    values: Mapping[str, float],
    peers: Sequence[Mapping[str, float]],
    limit: Mapping[str, float] | None,
) -> Iterator[Row]:
    for metric, (unit, less_is_better) in METRICS.items():
        if metric not in values:
            continue
        best = bound = None
        if less_is_better is not None and peers:
            best = (min if less_is_better else max)(peer[metric] for peer in peers)
        if metric in TIMES and limit is not None:
            bound = limit[metric]
        elif metric == "traffic_per_parameter":
            bound = system.traffic_formula(case.element_bytes)
        yield {
            "system": system.name,
            "case": case.name,
            "metric": metric,
            "value": values[metric],
            "unit": unit,
            "ratio_to_best_peer": ratio(values[metric], best, less_is_better=bool(less_is_better)),
            "ratio_to_limit": ratio(values[metric], bound, less_is_better=bool(less_is_better)),
        }


def ratio(value: float, reference: float | None, *, less_is_better: bool) -> float | None:
    """How many times better ``value`` is than ``reference``; ``None`` where that says nothing."""
    if reference is None or reference <= 0 or value <= 0:
        return None
    return round(reference / value if less_is_better else value / reference, 3)


def disagreements(case: Case, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Systems whose loss is not the others': the first loss of all, the last of those that reduce."""
    found = []
    for what in ("first", "last"):
        losses = {
            system.name: run.loss_first if what == "first" else run.values["loss_last"]
            for system in SYSTEMS
            for run in runs.get(system.name, ())[:1]
            if what == "first" or system.stage is not None
        }
        middle = statistics.median(losses.values()) if losses else 0.0
        found += [
            f"{case.name}, {name}: {what} loss {loss:.5f}, the others {middle:.5f}"
            for name, loss in losses.items()
            if abs(loss - middle) > LOSS_TOLERANCE[case.dtype] * middle
        ]
    return found


HEADINGS = (
    "system",
    "CPU s",
    "× limit",
    "wall s",
    "× limit",
    "exposed s",
    "tokens/s",
    "peak MB",
    "bytes/parameter",
    "loss",
)


def cells_of(rows: Sequence[Row], case_name: str) -> Iterator[list[str]]:
    """One line of a table per system."""
    for name in dict.fromkeys(row["system"] for row in rows if row["case"] == case_name):
        own = [row for row in rows if row["case"] == case_name and row["system"] == name]
        if "error" in own[0]:
            yield [name, f"error: {own[0]['error'].strip().splitlines()[-1]}"]
            continue
        by_metric = {row["metric"]: row for row in own}
        yield [name, *_numbers(by_metric)]


def _numbers(by_metric: Mapping[str, Row]) -> Iterator[str]:
    for metric in ("cpu_s_per_step", "wall_s_per_step"):
        yield f"{by_metric[metric]['value']:.3f}"
        to_limit = by_metric[metric]["ratio_to_limit"]
        yield f"{1 / to_limit:.2f}" if to_limit else ""
    exposed = by_metric.get("exposed_s_per_step")
    yield f"{exposed['value']:.3f}" if exposed else ""
    yield f"{by_metric['tokens_per_s']['value']:.0f}"
    yield f"{by_metric['peak_bytes']['value'] / 1e6:.0f}"
    yield f"{by_metric['traffic_per_parameter']['value']:.2f}"
    yield f"{by_metric['loss_last']['value']:.4f}"


def table_of(rows: Sequence[Row], case_name: str) -> Table:
    """A case as a table for a terminal."""
    table = Table(title=f"{case_name}, {WORLD_SIZE} ranks", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for cells in cells_of(rows, case_name):
        table.add_row(*cells)
    return table


def markdown_of(rows: Sequence[Row]) -> str:
    """All cases as tables for docs/results.md."""
    lines = []
    for case_name in dict.fromkeys(row["case"] for row in rows):
        lines += [
            f"**{case_name}**",
            "",
            f"| {' | '.join(HEADINGS)} |",
            "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        ]
        for cells in cells_of(rows, case_name):
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
