"""DeepSpeed for the benchmarks: in a folder of its own, because it installs a command named ds as well."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What DeepSpeed compiles at its first start.
COMPILE = (
    "import deepspeed_environment as e; e.reach(); from deepspeed.comm.torch import build_shm_op as b; b()"
)
VARIABLE = "DS_BENCH_PEERS"
LIMIT_S = 600.0
# DeepSpeed maps these and leaves them behind.
LITTER = "/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """How to start a process that can use DeepSpeed.

    Attributes:
        environment: variables for it.
        error: why there is none; empty if there is.
    """

    environment: dict[str, str]
    error: str = ""


def prepare() -> Prepared:
    """Install DeepSpeed as ``uv.lock`` has it, and let it compile what it compiles; quick if done before."""
    folder = Path(tempfile.gettempdir()) / f"ds-bench-peers-{os.getuid()}"
    # Beside uv's variables: ninja is called by name, and compiled operators stay in a place of their own.
    variables = {
        "UV_PROJECT_ENVIRONMENT": str(folder),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(folder / "compiled"),
        VARIABLE: str(folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"),
    }
    version = f"3.{sys.version_info.minor}"
    install = ["uv", "sync", "-q", "--frozen", "--inexact", "--only-group", "peers", "--python", version]
    error = _run(install, variables, cwd=ROOT) or _run([sys.executable, "-c", COMPILE], variables, cwd=None)
    return Prepared(environment=variables, error=error)


def _run(command: Sequence[str], variables: dict[str, str], *, cwd: Path | None) -> str:
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            cwd=cwd or Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"there is no {command[0]} on the path to install it with"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not finish within {LIMIT_S:.0f} s"
    return (done.stderr.strip().splitlines() or ["no output"])[-1] if done.returncode else ""


def reach() -> None:
    """Let this process import DeepSpeed; all else comes from where it came from before."""
    sys.path.append(os.environ[VARIABLE])


def run_script(script: str, arguments: Sequence[str], prepared: Prepared) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own that can use DeepSpeed after calling :func:`reach`."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | prepared.environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
