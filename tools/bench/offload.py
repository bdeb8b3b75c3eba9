"""Offload: the optimizer's step on the CPU and from files, and the files, beside peers and limits.

    uv run --group bench python tools/bench/offload.py [--quick] [--json FILE] [--markdown FILE] [--dir DIR]

One process and thread, systems in turn, medians over rounds. Cases:

- step: AdamW on fp32 gradients. The limit is the time this machine needs to move the 28 bytes per parameter
  that such a step reads and writes, at the speed of an addition in place. ds also takes the norm of the
  gradient; DeepSpeed's CPUAdam and torch's fused AdamW step one flat tensor.
- files: one file written over and read whole. The limit is fio with the same unbuffered access on the disk.
- step from files: the optimizer's states in files; MB/s of what is read and written in the step.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed_environment
import torch
from measured_table import MeasuredTable, medians, parser_of
from torch import nn

import ds_zero
from ds_zero.engine import engine_of
from ds_zero.swap_store import SwapStore

STEP_BYTES = 28  # AdamW in fp32: read weight, gradient and two moments, write weight and two moments
FORMATS = {
    "step": ("ms", "{:.1f}", True),
    "elements": ("M/s", "{:.0f}", False),
    "write": ("MB/s", "{:.0f}", False),
    "read": ("MB/s", "{:.0f}", False),
    "moved": ("MB/s", "{:.0f}", False),
}
DEEPSPEED_STEP = """
import sys, json, time, torch, deepspeed_environment
deepspeed_environment.reach()
from deepspeed.ops.adam import DeepSpeedCPUAdam
torch.set_num_threads(1)
numel, steps = int(sys.argv[1]), int(sys.argv[2])
parameter = torch.nn.Parameter(torch.zeros(numel))
parameter.grad = torch.ones(numel)
optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3)
optimizer.step()
times = []
for _ in range(steps):
    began = time.perf_counter()
    optimizer.step()
    times.append(time.perf_counter() - began)
print(json.dumps(sorted(times)[len(times) // 2]))
"""
DEEPSPEED_FILES = """
import sys, json, time, torch, deepspeed_environment
deepspeed_environment.reach()
from deepspeed.ops.op_builder import AsyncIOBuilder
aio = AsyncIOBuilder().load()
path, num_bytes = sys.argv[1], int(sys.argv[2])
handle = aio.aio_handle(8 << 20, 8, False, True, 2)
buffer = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
result = []
handle.sync_pwrite(buffer, path, 0)
for move in (handle.sync_pwrite, handle.sync_pread):
    began = time.perf_counter()
    move(buffer, path, 0)
    result.append(num_bytes / 1e6 / (time.perf_counter() - began))
print(json.dumps(result))
"""


def seconds_per_byte() -> float:
    """Of reading or writing one byte; best of several additions in place, which read two and write one."""
    source, target = torch.ones(1 << 26), torch.zeros(1 << 26)
    times = []
    for _ in range(7):
        began_s = time.perf_counter()
        target.add_(source)
        times.append(time.perf_counter() - began_s)
    return min(times) / (3 * source.nbytes)


class Many(nn.Module):
    """A stack of square matrices; its loss is linear, so that backward is short.

    Args:
        numel: elements in all.
    """

    def __init__(self, numel: int, width: int = 1024) -> None:
        super().__init__()
        count = numel // width**2
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, _: object) -> torch.Tensor:
        """The sum of all elements."""
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def sharded_step(numel: int, offload: ds_zero.Offload | None) -> tuple[Callable[[], None], nn.Module]:
    """A function that makes one step of a model whose gradients are there already."""
    model = Many(numel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, sharded = ds_zero.shard(model, optimizer, stage=2, offload=offload)
    loss: torch.Tensor = model(None)
    loss.backward()
    return sharded.step, model  # type: ignore[union-attr]


def torch_step(numel: int) -> Callable[[], None]:
    """Torch's own fused AdamW on one flat tensor."""
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    return torch.optim.AdamW([parameter], lr=1e-3, fused=True).step  # type: ignore[return-value]


def timed(step: Callable[[], None], numel: int, steps: int) -> dict[str, float]:
    """Median wall time after one warm-up."""
    step()
    times = []
    for _ in range(steps):
        began_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - began_s)
    return _step_values(sorted(times)[steps // 2], numel)


def _step_values(seconds: float, numel: int) -> dict[str, float]:
    return {"step": seconds * 1e3, "elements": numel / seconds / 1e6}


def _peer(script: str, *arguments: object) -> tuple[object, str]:
    """Run a script that uses DeepSpeed; its result, or what went wrong."""
    prepared = deepspeed_environment.prepare()
    if prepared.error:
        return None, prepared.error
    done = deepspeed_environment.run_script(script, [str(argument) for argument in arguments], prepared)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def measure_steps(table: MeasuredTable, *, numel: int, steps: int) -> None:
    """The optimizer's step in memory."""
    case = f"step, {numel / 1e6:.0f} M parameters"
    limit = _step_values(seconds_per_byte() * STEP_BYTES * numel, numel)
    table.add(case, "limit: 28 bytes per parameter", limit, limit=limit)
    peers = {"torch AdamW, fused": timed(torch_step(numel), numel, steps)}
    seconds, error = _peer(DEEPSPEED_STEP, numel, steps)
    if isinstance(seconds, float):
        peers["DeepSpeed CPUAdam"] = _step_values(seconds, numel)
    best = min(peers.values(), key=lambda values: values["step"])
    for name, values in peers.items():
        table.add(case, name, values, limit=limit)
    if error:
        table.fail(case, "DeepSpeed CPUAdam", error)
    for name, offload in (
        ("ds, on the device", None),
        ("ds, optimizer offloaded", ds_zero.Offload(optimizer="cpu")),
    ):
        step, model = sharded_step(numel, offload)
        table.add(case, name, timed(step, numel, steps), best_peer=best, limit=limit)
        ds_zero.close(model)


def _fio(folder: Path, num_bytes: int) -> tuple[dict[str, float], str]:
    if shutil.which("fio") is None:
        return {}, "fio is not installed"
    values = {}
    for kind in ("write", "write", "read"):
        command = ["fio", "--name=x", f"--directory={folder}", f"--rw={kind}", "--direct=1", "--bs=8M"]
        command += [f"--size={num_bytes}", "--ioengine=psync", "--numjobs=2", "--thread", "--group_reporting"]
        command += ["--output-format=json", "--filename=fio.bin", "--offset_increment=50%", "--io_size=50%"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {}, (done.stderr.strip().splitlines() or ["failed"])[-1]
        values[kind] = json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"] / 1e6
    return values, ""


def _swap(folder: Path, num_bytes: int) -> dict[str, float]:
    store = SwapStore(folder, rank=0)
    store.create("x", num_bytes)
    buffer = store.buffer(num_bytes, torch.uint8).fill_(1)
    values = {}
    for name, move in (
        ("write", store.write_async),
        ("write", store.write_async),
        ("read", store.read_async),
    ):
        began_s = time.perf_counter()
        move("x", buffer).wait()
        values[name] = num_bytes / 1e6 / (time.perf_counter() - began_s)
    store.close()
    return values


def _torch_files(folder: Path, num_bytes: int) -> dict[str, float]:
    path, tensor = folder / "torch.pt", torch.ones(num_bytes, dtype=torch.uint8)
    began_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(tensor, file)
        file.flush()
        subprocess.run(["sync", str(path)], check=True)
    written_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    torch.load(path)
    return {"write": num_bytes / 1e6 / written_s, "read": num_bytes / 1e6 / (time.perf_counter() - began_s)}


def measure_files(table: MeasuredTable, folder: Path, *, num_bytes: int, rounds: int) -> dict[str, float]:
    """One file written and read; the limit."""
    case = f"files, {num_bytes / 1e6:.0f} MB"
    runs: dict[str, list[dict[str, float]]] = {}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        limit, error = _fio(folder, num_bytes)
        if error:
            errors["fio, unbuffered"] = error
        else:
            runs.setdefault("fio, unbuffered", []).append(limit)
        runs.setdefault("ds", []).append(_swap(folder, num_bytes))
        speeds, error = _peer(DEEPSPEED_FILES, folder / "deepspeed.bin", num_bytes)
        if isinstance(speeds, list):
            runs.setdefault("DeepSpeed aio, pinned", []).append({"write": speeds[0], "read": speeds[1]})
        else:
            errors["DeepSpeed aio, pinned"] = error
        runs.setdefault("torch.save + sync, torch.load (cached)", []).append(_torch_files(folder, num_bytes))
    found = {name: medians(taken) for name, taken in runs.items()}
    bound = found.get("fio, unbuffered", {})
    for name, values in found.items():
        table.add(
            case,
            name,
            values,
            best_peer=found.get("DeepSpeed aio, pinned") if name == "ds" else None,
            limit=bound,
        )
    for name, error in errors.items():
        if name not in found:
            table.fail(case, name, error)
    return bound


def measure_file_step(table: MeasuredTable, folder: Path, *, numel: int, bound: dict[str, float]) -> None:
    """The optimizer's step with its states in files."""
    step, model = sharded_step(numel, ds_zero.Offload(optimizer="file", path=str(folder)))
    step()
    store = engine_of(model).homes.store
    before = store.bytes_read + store.bytes_written if store is not None else 0
    values = timed(step, numel, 3)
    moved = ((store.bytes_read + store.bytes_written) - before) / 4 if store is not None else 0
    values["moved"] = moved / 1e6 / (values["step"] / 1e3)
    both = {"moved": 2 / (1 / bound["read"] + 1 / bound["write"])} if bound else {}
    table.add(f"step from files, {numel / 1e6:.0f} M parameters", "ds", values, limit=both)
    ds_zero.close(model)


def main() -> int:
    """Measure, and show or write what was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = MeasuredTable("offload", FORMATS)
    numel = (16 if options.quick else 64) << 20
    measure_steps(table, numel=numel, steps=3 if options.quick else 7)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        num_bytes = (64 if options.quick else 512) << 20
        bound = measure_files(table, Path(folder), num_bytes=num_bytes, rounds=1 if options.quick else 3)
        measure_file_step(table, Path(folder), numel=numel, bound=bound)
    table.finish(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
