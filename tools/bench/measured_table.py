"""Measurements of one benchmark as rows in the common form, as a table for people and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from training_report import ratio

Row = dict[str, Any]


class MeasuredTable:
    """Systems in rows, metrics in columns, a table for every case.

    Args:
        name: of the benchmark.
        formats: for every metric its unit, how a cell shows it, and whether less is better.
    """

    def __init__(self, name: str, formats: dict[str, tuple[str, str, bool]]) -> None:
        self.name = name
        self.rows: list[Row] = []
        self._formats = formats

    def add(
        self,
        case: str,
        system: str,
        values: dict[str, float],
        *,
        best_peer: dict[str, float] | None = None,
        limit: dict[str, float] | None = None,
    ) -> None:
        """Add what one system did in one case; ratios are taken where there is a peer or a limit."""
        for metric, value in values.items():
            unit, _, less = self._formats[metric]
            self.rows.append(
                {
                    "system": system,
                    "case": case,
                    "metric": metric,
                    "value": value,
                    "unit": unit,
                    "ratio_to_best_peer": ratio(value, (best_peer or {}).get(metric), less_is_better=less),
                    "ratio_to_limit": ratio(value, (limit or {}).get(metric), less_is_better=less),
                }
            )

    def fail(self, case: str, system: str, error: str) -> None:
        """Add a system that could not run."""
        self.rows.append({"system": system, "case": case, "error": error})

    def _cells(self, case: str) -> list[list[str]]:
        lines = []
        for system in dict.fromkeys(row["system"] for row in self.rows if row["case"] == case):
            mine = [row for row in self.rows if row["case"] == case and row["system"] == system]
            if "error" in mine[0]:
                lines.append([system, f"error: {mine[0]['error'].strip().splitlines()[-1]}"])
                continue
            by_metric = {row["metric"]: row for row in mine if "metric" in row}
            cells = [system]
            for metric, (_, form, _) in self._formats.items():
                row = by_metric.get(metric)
                cells.append("" if row is None else form.format(row["value"]))
            lines.append(cells)
        return lines

    def _cases(self) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.rows))

    def markdown(self) -> str:
        """All cases as tables for docs/results.md."""
        heads = ["system", *(f"{metric}, {unit}" for metric, (unit, *_) in self._formats.items())]
        parts = []
        for case in self._cases():
            parts += [
                f"**{case}**",
                "",
                f"| {' | '.join(heads)} |",
                "|---" + "|---:" * (len(heads) - 1) + "|",
            ]
            parts += [f"| {' | '.join(cells)} |" for cells in self._cells(case)]
            parts.append("")
        return "\n".join(parts)

    def show(self) -> None:
        """Print a table for every case."""
        for case in self._cases():
            table = Table(title=case, title_justify="left")
            table.add_column("system")
            for metric, (unit, *_) in self._formats.items():
                table.add_column(f"{metric}\n{unit}", justify="right")
            for cells in self._cells(case):
                table.add_row(*cells)
            Console().print(table)

    def finish(self, options: argparse.Namespace) -> None:
        """Print, and write the files that were asked for."""
        self.show()
        if options.json:
            options.json.write_text(json.dumps({"case": self.name, "rows": self.rows}, indent=1))
        if options.markdown:
            options.markdown.write_text(self.markdown())


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    return parser


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every metric over runs; the lower one of two."""
    return {key: sorted(run[key] for run in runs)[(len(runs) - 1) // 2] for key in runs[0]}
