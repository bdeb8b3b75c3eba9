"""One rank of one measured run: ``train_step_rank.py SYSTEM SIZE LOAD DTYPE STEPS``; rank 0 prints a JSON line."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_step_systems import SYSTEMS, batches, build, join

WARM_STEPS = 3


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return 0


def memory_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def main(system: str, size: str, load: str, dtype: str, steps: int) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    join(system)
    rank = int(os.environ["RANK"])
    base_bytes = memory_bytes("VmRSS")
    model = build(size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    step = SYSTEMS[system](model, dtype)
    data = batches(size, load, rank)
    for _ in range(WARM_STEPS):
        step(next(data))
    dist.barrier()
    sent, walls, cpus = loopback_bytes(), [], []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(next(data))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    dist.barrier()
    sent = loopback_bytes() - sent
    average = loss.detach().float().clone()
    dist.all_reduce(average)
    result = {
        "wall_s": walls,
        "cpu_s": cpus,
        "loss": float(average) / dist.get_world_size(),
        "sent_bytes_per_parameter": sent / dist.get_world_size() / steps / num_parameters,
        "peak_bytes": memory_bytes("VmHWM") - base_bytes,
        "parameters": num_parameters,
    }
    if rank == 0:
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
