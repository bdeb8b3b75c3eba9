"""The reference page of the configuration is what the code says."""

from __future__ import annotations

import config_reference


def test_the_page_is_current() -> None:
    assert config_reference.PAGE.read_text() == config_reference.page(), (
        "write it anew with: uv run python tools/config_reference.py"
    )
