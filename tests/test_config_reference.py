"""The reference page of the configuration is what the code says."""

from __future__ import annotations

import config_reference
import workspace
from ds.config import Config


def test_the_page_is_current() -> None:
    assert config_reference.PAGE.read_text() == config_reference.page(), (
        "write it anew with: uv run python tools/config_reference.py"
    )


def test_the_schema_is_the_frozen_one(check_snapshot) -> None:
    schema = Config.model_json_schema()
    check_snapshot(workspace.ROOT / "tests" / "snapshots" / "config_schema.json", schema)
