"""The public names of every package are frozen in a file, so that adding or losing one shows in the diff.

Write it anew with ``uv run pytest tests/test_public_names.py --update-snapshots``.
"""

from __future__ import annotations

import importlib

import pytest

import workspace

SNAPSHOT = workspace.ROOT / "tests" / "snapshots" / "public_names.json"


@pytest.mark.parametrize("member", workspace.members(), ids=lambda member: member.name)
def test_every_public_name_exists_and_is_declared_once(member: workspace.Member) -> None:
    module = importlib.import_module(member.import_name)
    names = list(module.__all__)
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
    assert set(names) <= set(dir(module)), "a lazy package lists its names in __dir__ too"


def test_public_names_are_the_frozen_ones(check_snapshot) -> None:
    names = {
        member.import_name: sorted(getattr(importlib.import_module(member.import_name), "__all__", []))
        for member in workspace.members()
    }
    check_snapshot(SNAPSHOT, names)
