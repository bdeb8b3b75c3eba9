"""``ds report``: what this environment has, as one table that fits 80 columns."""

import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

PACKAGES = (
    "ds",
    "ds-spec",
    "ds-kernels",
    "ds-profile",
    "ds-comm",
    "ds-zero",
    "ds-parallel",
    "ds-pipe",
    "ds-ckpt",
    "ds-compress",
    "ds-infer",
    "ds-rlhf",
)
LIBRARIES = ("torch", "triton", "numpy", "msgspec", "pydantic", "safetensors", "tokenizers", "transformers")
COMPILERS = ("c++", "ninja", "nvcc", "hipcc")
SHARED_MEMORY = Path("/dev/shm")
ABSENT = ("not installed", "not found", "none")

# Section to name to fact; every fact is JSON.
Report = dict[str, dict[str, Any]]


def gather_report() -> Report:
    """Facts by section: packages, libraries, machine, devices, communication, tools."""
    return {
        "packages": {name: version_of(name) for name in PACKAGES},
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "machine": _machine(),
        "devices": _devices(),
        "communication": _communication(),
        "tools": {name: shutil.which(name) or "not found" for name in COMPILERS},
    }


def version_of(distribution: str) -> str:
    """The installed version, or ``not installed``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_for_us": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> dict[str, Any]:
    import torch

    if not torch.accelerator.is_available():
        return {"accelerator": "none", "count": 0, "nvidia_driver": _nvidia_driver()}
    found: dict[str, Any] = {
        "accelerator": str(torch.accelerator.current_accelerator()),
        "count": torch.accelerator.device_count(),
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
    }
    return found | {"nvidia_driver": _nvidia_driver()} | _nvidia_devices()


def _nvidia_driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "not found"
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _nvidia_devices() -> dict[str, str]:
    """Name and memory of each device; empty without NVIDIA's driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        found = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gib = int(memory.total) / 2**30
            found[f"device_{index}"] = f"{pynvml.nvmlDeviceGetName(handle)}, {gib:.0f} GiB"
        return found
    finally:
        pynvml.nvmlShutdown()


def _communication() -> dict[str, Any]:
    from ds_comm.launch import available_backends

    found: dict[str, Any] = {"backends": available_backends()}
    if SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(SHARED_MEMORY)
        found |= {"dev_shm_bytes": room.total, "dev_shm_free_bytes": room.free}
    return found


def report_json(facts: Report) -> str:
    """The report as one JSON object."""
    return json.dumps(facts, indent=2)


def show_report(facts: Report) -> None:
    """Print the report as one table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title="ds report", title_justify="left", expand=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, entries in facts.items():
        table.add_section()
        for index, (name, value) in enumerate(entries.items()):
            shown = shown_fact(name, value)
            label = name.removesuffix("_bytes").replace("_", " ")
            style = "dim" if shown in ABSENT else None
            table.add_row(f"[bold]{section}[/]" if index == 0 else "", label, shown, style=style)
    Console().print(table)


def shown_fact(name: str, value: Any) -> str:
    """A fact as a person reads it."""
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
