"""What an import costs, as the number of modules it loads: the same on a busy and on an idle machine.

The times themselves are measured by tools/bench/import_time.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

import workspace

# Measured on Python 3.11 and rounded up by about a third; an import that needs more should say why here.
MAX_MODULES_DS = 40
MAX_MODULES_DS_SPEC = 110
# Half of them are ds_zero's own files, one noun each; together they take 0.12 s of CPU time.
MAX_MODULES_DS_ZERO_BEYOND_TORCH = 105

HEAVY = ("torch", "numpy", "pydantic", "transformers", "rich", "typer", "msgspec")


def new_modules(statement: str, *, after: str = "pass") -> list[str]:
    """Run ``after`` and then ``statement`` in a fresh interpreter; return what the second added."""
    code = (
        f"import sys, json\n{after}\nbefore = set(sys.modules)\n{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def of_package(modules: list[str], package: str) -> list[str]:
    return [name for name in modules if name == package or name.startswith(package + ".")]


def test_import_ds_loads_no_torch_and_little_else() -> None:
    modules = new_modules("import ds")
    assert {name: of_package(modules, name) for name in HEAVY if of_package(modules, name)} == {}
    assert len(modules) <= MAX_MODULES_DS


def test_import_ds_loads_no_other_member() -> None:
    modules = new_modules("import ds")
    others = [member.import_name for member in workspace.members() if member.import_name != "ds"]
    assert [name for name in others if of_package(modules, name)] == []


def test_import_ds_spec_needs_no_torch() -> None:
    modules = new_modules("import ds_spec")
    assert of_package(modules, "torch") + of_package(modules, "numpy") == []
    assert len(modules) <= MAX_MODULES_DS_SPEC


def test_import_ds_zero_adds_little_to_torch() -> None:
    modules = new_modules("import ds_zero", after="import torch")
    assert of_package(modules, "torch._inductor") == []
    assert of_package(modules, "ds") == []
    assert len(modules) <= MAX_MODULES_DS_ZERO_BEYOND_TORCH
