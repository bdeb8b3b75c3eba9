"""One rank of one run of train_step.py: builds a system, trains, and counts time, memory and traffic."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_group import Rank
from training_cases import NUM_BATCHES, Case, System


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank saw.

    Attributes:
        wall_s: of every measured step.
        cpu_s: of all measured steps together, every thread of this process.
        peak_bytes: most resident bytes during the measured steps beyond those before the model was built.
        losses: of every step, warm-up included.
        event_bytes: bytes sent in one step by ds's own account; ``None`` for others.
    """

    wall_s: list[float]
    cpu_s: float
    peak_bytes: int
    losses: list[float]
    num_parameters: int
    event_bytes: int | None


def measure(rank: Rank, system: System, case: Case) -> Measured:
    """Train and measure; for :func:`rank_group.run_group`.

    Collective: every rank.
    """
    import torch
    from training_systems import build

    torch.set_num_threads(1)
    _load_libraries()
    before_bytes = _resident_bytes("VmRSS")
    step, num_parameters = build(system, case)
    ctypes.CDLL(None).malloc_trim(0)
    generator = torch.Generator().manual_seed(1000 + rank.rank)
    shape = (case.batch_size, case.length + 1)
    batches = [torch.randint(0, case.vocabulary, shape, generator=generator) for _ in range(NUM_BATCHES)]
    losses = [step(batches[index % NUM_BATCHES]) for index in range(case.num_warmup)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    rank.meet()
    began_cpu_s = time.process_time()
    wall_s = []
    for index in range(case.num_warmup, case.num_warmup + case.num_steps):
        began_s = time.perf_counter()
        losses.append(step(batches[index % NUM_BATCHES]))
        wall_s.append(time.perf_counter() - began_s)
    cpu_s = time.process_time() - began_cpu_s
    peak_bytes = _resident_bytes("VmHWM") - before_bytes
    rank.meet()
    return Measured(
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_bytes=peak_bytes,
        losses=losses,
        num_parameters=num_parameters,
        event_bytes=_bytes_by_events(step, batches[0]) if system.kind == "ds" else None,
    )


def _load_libraries() -> None:
    """Run every kind of operator once, so that the libraries' own memory is not counted as the system's."""
    import torch
    from training_cases import CASES
    from training_systems import adamw, build_model, next_token_loss

    tiny = build_model(dataclasses.replace(CASES[0], vocabulary=64, width=64, depth=1))
    optimizer = adamw(tiny.parameters())
    next_token_loss(tiny, torch.zeros(1, 9, dtype=torch.long)).backward()
    optimizer.step()


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {field}")


def _bytes_by_events(step: Callable[[Any], float], batch: Any) -> int:
    from ds_spec import events
    from ds_spec.event import CommEvent

    with events.collect() as collected:
        step(batch)
    return sum(event.bytes_sent for event in collected if isinstance(event, CommEvent))
