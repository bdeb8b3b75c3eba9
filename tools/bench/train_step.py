"""A training step of ds beside its peers: time, memory and traffic on two CPU ranks over gloo.

    uv run --group bench python tools/bench/train_step.py [--quick] [--json FILE] [--markdown FILE]

Systems take turns, each time in fresh processes with one thread each, and medians over rounds are compared.
"no communication" is the same step with every rank for itself: the limit. Columns:

- CPU: seconds of a rank's process in a step, all its threads; wall: of a step, on the slower rank.
- exposed: wall time beyond the limit's.
- peak: resident memory while steps run, beyond what the libraries took before the model was built. What is
  shared between ranks counts on each.
- bytes/parameter: what a rank sends in a step, counted on a loopback device that only these ranks use.
- loss: of the last step, mean over ranks. All systems must agree, else the exit code is 1.

In the JSON file ``ratio_to_best_peer`` compares ds with the best peer that shards the same (0 nothing, 1 the
optimizer, 2 gradients, 3 parameters); ``ratio_to_limit`` compares times with the limit and traffic with the
formula.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed_environment
from rank_group import GroupError, run_group
from rich.console import Console
from rich.progress import track
from training_cases import CASES, SYSTEMS, WORLD_SIZE, Case, System
from training_rank import measure
from training_report import Run, disagreements, markdown_of, rows_of, summarize, table_of

RUN_LIMIT_S = 400.0


def run_case(
    case: Case,
    systems: Sequence[System],
    *,
    rounds: int,
    deepspeed: dict[str, str],
    errors: dict[str, str],
    console: Console,
) -> dict[str, list[Run]]:
    """Every system once in every round; one that fails is noted in ``errors`` and left out from then on."""
    runs: dict[str, list[Run]] = {system.name: [] for system in systems}
    turns = [system for _ in range(rounds) for system in systems]
    for system in track(turns, description=case.name, console=console, disable=not console.is_terminal):
        if system.name in errors:
            continue
        try:
            result = run_group(
                measure,
                WORLD_SIZE,
                system,
                case,
                timeout_s=RUN_LIMIT_S,
                environment={"OMP_NUM_THREADS": "1", **(deepspeed if system.kind == "deepspeed" else {})},
                litter=deepspeed_environment.LITTER if system.kind == "deepspeed" else "",
            )
        except GroupError as error:
            errors[system.name] = str(error)
            console.print(f"{case.name}: {system.name}: {error}", style="red", markup=False)
            continue
        if not result.is_private:
            console.print("no private loopback device: traffic counts everybody's", style="yellow")
        run = summarize(result, case)
        runs[system.name].append(run)
        if not console.is_terminal:
            cpu_s, wall_s = run.values["cpu_s_per_step"], run.values["wall_s_per_step"]
            console.print(
                f"{case.name}: {system.name}: CPU {cpu_s:.3f} s, wall {wall_s:.3f} s", highlight=False
            )
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, write, and tell by the exit code whether the losses agree."""
    options = parse(arguments)
    log, console = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 120)
    cases = choose_cases(options)
    chosen = [s for s in SYSTEMS if options.system in s.name or s.stage is None]
    deepspeed = deepspeed_environment.Prepared(environment={})
    if any(system.kind == "deepspeed" for system in chosen):
        log.print("preparing DeepSpeed; the first time it compiles for a minute or two", highlight=False)
        deepspeed = deepspeed_environment.prepare()
    rows, wrong = [], []
    for case in cases:
        errors = {s.name: deepspeed.error for s in chosen if s.kind == "deepspeed" and deepspeed.error}
        runs = run_case(
            case,
            chosen,
            rounds=options.rounds or (1 if options.quick else 3),
            deepspeed=deepspeed.environment,
            errors=errors,
            console=log,
        )
        rows += rows_of(case, runs, errors)
        wrong += disagreements(case, runs)
        console.print(table_of(rows, case.name))
        if options.json:  # after every case, so that a long run leaves what it has
            options.json.write_text(json.dumps({"case": "train_step", "rows": rows}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown_of(rows))
    for line in wrong:
        console.print(line, style="red")
    console.print("losses do not agree" if wrong else "losses agree")
    return 1 if wrong else 0


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """The cases asked for, with the number of steps asked for."""
    cases = [case for case in CASES if options.case in case.name][: 1 if options.quick else None]
    steps = options.steps or (6 if options.quick else None)
    return [dataclasses.replace(case, num_steps=steps or case.num_steps) for case in cases]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first case, one round, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--steps", type=int, help="measured steps of a run, default by case")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--system", default="", help="only systems whose name contains this, and the limit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
