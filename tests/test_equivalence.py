"""The quick equivalence matrix holds, and the published table is the full one."""

import importlib.util
import json
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def load(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_every_cell_of_the_quick_matrix_holds(tmp_path):
    load("equivalence_cases")
    tool = load("equivalence")
    assert tool.main(["--quick", "--json", str(tmp_path / "cells.json")]) == 0
    cells = json.loads((tmp_path / "cells.json").read_text())["cells"]
    assert {cell["stage"] for cell in cells} == {0, 1, 2, 3}
    assert all(cell["holds"] for cell in cells)


def test_the_published_table_has_every_row_and_no_failure():
    cases = load("equivalence_cases")
    text = (TOOLS.parent / "docs" / "equivalence.md").read_text()
    tool = load("equivalence")
    for case in cases.all_cases(quick=False):
        if not case.is_plain or case.accumulation == tool.OPTION_ACCUMULATION:
            continue
        clipping = "on" if case.clipping else "off"
        assert f"| {case.ranks} | {case.dtype} | {case.accumulation} | {clipping} |" in text
    for name in (*cases.OPTIONS, *(f"recompute {policy}" for policy in cases.RECOMPUTES)):
        assert f"| {name} |" in text
    for name in cases.OPTIMIZERS:
        assert f"| optimizer {name} |" in text
    assert "FAILS" not in text
    assert "DIFFERENT" not in text
