"""``ds report``: what this environment has, as one table that fits 80 columns."""

import importlib.metadata
import os
import platform
import shutil
from typing import Any

PACKAGES = [
    "ds",
    "ds-spec",
    "ds-kernels",
    "ds-profile",
    "ds-comm",
    "ds-zero",
    "ds-parallel",
    "ds-pipe",
    "ds-ckpt",
]
PACKAGES += ["ds-compress", "ds-infer", "ds-rlhf"]
LIBRARIES = ["torch", "triton", "numpy", "msgspec", "pydantic", "transformers", "accelerate", "lightning"]


def gather_report() -> dict[str, dict[str, Any]]:
    """Sections of facts: packages, libraries, machine, devices, communication, tools."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "libraries": {name: _version(name) for name in LIBRARIES},
        "machine": _machine(),
        "devices": _devices(),
        "communication": _communication(),
        "tools": {name: shutil.which(name) or "not found" for name in ("g++", "ninja", "nvcc")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cores": os.cpu_count(),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
    }


def _devices() -> dict[str, Any]:
    import torch

    if not torch.accelerator.is_available():
        return {"accelerators": "none; ranks run on the CPU"}
    kind = torch.accelerator.current_accelerator()
    found: dict[str, Any] = {"accelerators": f"{torch.accelerator.device_count()} x {kind}"}
    return found | _nvidia()


def _nvidia() -> dict[str, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"nvidia driver": f"not available ({error})"}
    found: dict[str, Any] = {"nvidia driver": pynvml.nvmlSystemGetDriverVersion()}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found[f"device {index}"] = f"{pynvml.nvmlDeviceGetName(handle)}, {int(memory.total) / 2**30:.0f} GiB"
    pynvml.nvmlShutdown()
    return found


def _communication() -> dict[str, Any]:
    from ds_comm.launch import available_backends

    found: dict[str, Any] = {"backends": ", ".join(available_backends())}
    if os.path.isdir("/dev/shm"):
        found["/dev/shm"] = f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    return found


def show_report() -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for section, facts in gather_report().items():
        table = Table(title=section, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in facts.items():
            missing = value in ("not installed", "not found")
            table.add_row(name, str(value), style="dim" if missing else None)
        console.print(table)
