"""Settings that every test of the workspace shares: determinism, and snapshots of frozen facts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: ranks share few cores, and one thread makes sums independent of the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# The same examples on every run, and no verdict that depends on how busy the machine is.
hypothesis.settings.register_profile(
    "workspace",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("workspace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots",
        action="store_true",
        help="write the snapshot files anew instead of comparing with them; look at the diff, then commit it",
    )


@pytest.fixture
def check_snapshot(request: pytest.FixtureRequest) -> Callable[[Path, Any], None]:
    """Compare JSON-able data with a frozen file, or write the file under ``--update-snapshots``."""

    def check(path: Path, value: Any) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        if request.config.getoption("--update-snapshots"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        command = f"uv run pytest {request.node.nodeid.split('[')[0]} --update-snapshots"
        if not path.is_file():
            pytest.fail(f"expected the snapshot {path}, found none; write it with: {command}")
        assert text == path.read_text(), f"differs from {path.name}; when the change is meant: {command}"

    return check
