"""Recomputation of activations: bytes that blocks hold for backward, and time of a step, by policy.

    uv run --group bench python tools/bench/recompute.py [--quick] [--json FILE] [--markdown FILE]

One process and thread; policies take turns, medians over rounds. "held" is every storage alive between
forward and backward, without parameters; "step" is forward and backward in CPU seconds.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from measured_table import MeasuredTable, medians, parser_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_cases import LARGE, SMALL, Case
from training_systems import build_model

import ds_zero
from ds.demo.model import next_token_loss
from ds_zero.live_storages import LiveStorages
from ds_zero.recompute import wrapped
from ds_zero.recompute_measure import measure as measure_blocks
from ds_zero.recompute_plan import choose

FORMATS = {
    "held": ("MB", "{:.1f}", True),
    "held against none": ("%", "{:+.0f}", True),
    "step": ("CPU s", "{:.3f}", True),
    "time against none": ("%", "{:+.1f}", True),
}
POLICIES = ("none", "matmuls", "selective", "attention", "full")
PEER = "torch checkpoint, every block"


def _torch_checkpoint(model: nn.Module) -> Callable[[], None]:
    blocks = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return lambda: [block.__dict__.pop("forward") for block in blocks]  # type: ignore[return-value]


def _apply(model: nn.Module, system: str, plans: dict[str, dict[str, str]]) -> Callable[[], object]:
    if system == PEER:
        return _torch_checkpoint(model)
    return ds_zero.recompute(model, plans.get(system, system)).remove


def _plan(model: nn.Module, sample: Callable[[], torch.Tensor]) -> dict[str, dict[str, str]]:
    """Policies by block for the budgets, from one measurement."""
    blocks = {name: module for name, module in model.named_modules() if name.startswith("blocks.")}
    names = [name for name in blocks if name.count(".") == 1]
    costs = measure_blocks(model, {name: blocks[name] for name in names}, sample, wrap=wrapped)
    everything = sum(options["none"].saved_bytes for options in costs.values())
    return {
        f"budget {share} %": dict(choose(costs, everything * share // 100).policies) for share in (70, 50)
    }


def _run(model: nn.Module, batch: torch.Tensor) -> dict[str, float]:
    model.zero_grad()
    with LiveStorages(ignored=model.parameters()) as live:
        loss = next_token_loss(model, batch)
        held = live.held_bytes()
    loss.backward()
    model.zero_grad()
    began_s = time.process_time()
    next_token_loss(model, batch).backward()
    return {"held": held / 1e6, "step": time.process_time() - began_s}


def measure(case: Case, *, rounds: int, table: MeasuredTable) -> None:
    """Run every policy on one model."""
    torch.set_num_threads(1)
    model = build_model(case)
    batch = torch.randint(0, case.vocabulary, (case.batch_size, case.length + 1))
    sample = partial(next_token_loss, model, batch)
    plans = _plan(model, sample)
    systems = [*POLICIES, *plans, PEER]
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system in systems:
            remove = _apply(model, system, plans)
            runs[system].append(_run(model, batch))
            remove()
    found = {system: medians(taken) for system, taken in runs.items()}
    for system, values in found.items():
        values["held against none"] = 100 * (values["held"] / found["none"]["held"] - 1)
        values["time against none"] = 100 * (values["step"] / found["none"]["step"] - 1)
        is_peer = system == PEER
        table.add(case.name, system, values, best_peer=None if is_peer else found[PEER], limit=found["none"])


def main() -> int:
    """Measure, and show or write what was asked for."""
    options = parser_of(__doc__).parse_args()
    table = MeasuredTable("recompute", FORMATS)
    sizes = {"name": "27M, 2 x 256", **SMALL} if options.quick else {"name": "110M, 2 x 512", **LARGE}
    case = Case(**sizes, batch_size=2, length=256 if options.quick else 512, dtype="fp32", num_steps=1)
    measure(dataclasses.replace(case), rounds=1 if options.quick else 3, table=table)
    table.finish(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
