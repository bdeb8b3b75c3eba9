"""Every distribution of the workspace has what a distribution needs, and the root lists all of them."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

import workspace

MEMBERS = workspace.members()
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def test_root_depends_on_exactly_the_members() -> None:
    dependencies = workspace.root_table()["project"]["dependencies"]
    assert sorted(dependencies) == sorted(member.name for member in MEMBERS)
    assert len(dependencies) == len(set(dependencies))


def test_uv_sees_the_same_members() -> None:
    listing = subprocess.run(
        ["uv", "workspace", "list"], cwd=workspace.ROOT, check=True, capture_output=True, text=True
    )
    root_name = workspace.root_table()["project"]["name"]
    assert sorted({*listing.stdout.split()} - {root_name}) == sorted(member.name for member in MEMBERS)


def test_every_member_is_taken_from_the_workspace() -> None:
    sources = workspace.root_table()["tool"]["uv"]["sources"]
    assert sources == {member.name: {"workspace": True} for member in MEMBERS}


@each_member
def test_member_carries_its_documents(member: workspace.Member) -> None:
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        assert (member.path / name).stat().st_size > 0
    assert (member.source / "py.typed").is_file()
    assert (member.path / "LICENSE").read_text() == (workspace.ROOT / "LICENSE").read_text()


@each_member
def test_member_has_a_static_version_described_in_its_changelog(member: workspace.Member) -> None:
    assert "dynamic" not in member.project
    assert member.version is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", member.version)
    assert "\n## [Unreleased]\n" in (member.path / "CHANGELOG.md").read_text()


@each_member
def test_member_states_licence_and_python_alike(member: workspace.Member) -> None:
    assert member.project["license"] == "Apache-2.0"
    assert member.project["license-files"] == ["LICENSE"]
    assert member.project["requires-python"] == ">=3.11"
    assert "Typing :: Typed" in member.project["classifiers"]


@each_member
def test_sibling_bounds_admit_the_current_version_and_stop_before_the_next(member: workspace.Member) -> None:
    versions = {sibling.name: sibling.version for sibling in MEMBERS}
    for requirement in member.dependencies:
        name = workspace.requirement_name(requirement)
        if name in versions:
            major, minor, _ = (int(part) for part in str(versions[name]).split("."))
            assert requirement == f"{name}>={major}.{minor},<{major}.{minor + 1}"


@each_member
def test_status_line_is_truthful(member: workspace.Member) -> None:
    assert member.status in {"planned", "alpha", "beta", "stable"}
    planned = member.status == "planned"
    assert ("Development Status :: 1 - Planning" in member.project["classifiers"]) == planned
    if planned:
        assert [path.name for path in member.source.rglob("*.py")] == ["__init__.py"]
        body = ast.parse((member.source / "__init__.py").read_text()).body
        assert [type(node) for node in body[1:]] == [ast.AnnAssign], "a planned package exports nothing"
        assert member.dependencies == []


def test_config_files_of_one_kind_agree_on_the_python_version() -> None:
    floor = workspace.root_table()["project"]["requires-python"].removeprefix(">=")
    assert workspace.root_table()["tool"]["pyright"]["pythonVersion"] == floor
    assert workspace.root_table()["tool"]["ruff"]["target-version"] == "py" + floor.replace(".", "")


@each_member
def test_pyright_looks_at_the_library_code(member: workspace.Member) -> None:
    # Plain folders: pyright finds nothing under `packages/*/src`, and says so nowhere.
    included = [workspace.ROOT / folder for folder in workspace.root_table()["tool"]["pyright"]["include"]]
    assert any(member.source.is_relative_to(folder) for folder in included)
