"""What the uv workspace consists of, read from its files: members, their metadata, Markdown examples.

Imports nothing of ds, so that checks can look at a package that does not import yet.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_STATUS = re.compile(r"^Status: (\w+)", re.MULTILINE)
_SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\][^\n]*\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One distribution of the workspace: its folder and the ``[project]`` table."""

    path: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        """Distribution name, such as ``ds-zero``."""
        return self.project["name"]

    @property
    def import_name(self) -> str:
        """Module name, such as ``ds_zero``."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str | None:
        """Static version, or None when the table has none (a dynamic one)."""
        return self.project.get("version")

    @property
    def source(self) -> Path:
        """Folder of the import package."""
        return self.path / "src" / self.import_name

    @property
    def dependencies(self) -> list[str]:
        """Requirement strings, without extras."""
        return list(self.project.get("dependencies", []))

    @property
    def status(self) -> str | None:
        """The word after ``Status:`` in the README: ``planned``, ``alpha``, ``beta`` or ``stable``."""
        found = _STATUS.search((self.path / "README.md").read_text())
        return found.group(1) if found else None


def root_table() -> dict[str, Any]:
    """Return the workspace's own ``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def members() -> list[Member]:
    """Return every member in the order of the root's dependency list, then any that it forgot."""
    folders = [
        folder
        for pattern in root_table()["tool"]["uv"]["workspace"]["members"]
        for folder in sorted(ROOT.glob(pattern))
        if (folder / "pyproject.toml").is_file()
    ]
    found = [
        Member(path=folder, project=tomllib.loads((folder / "pyproject.toml").read_text())["project"])
        for folder in folders
    ]
    order = root_table()["project"]["dependencies"]
    return sorted(found, key=lambda member: order.index(member.name) if member.name in order else len(order))


def source_files() -> Iterator[tuple[Member, Path]]:
    """Yield every Python file of every member's library code."""
    for member in members():
        for path in sorted(member.source.rglob("*.py")):
            yield member, path


def tracked_files() -> list[Path]:
    """Return what git tracks or would track (new files that it does not ignore), as existing files."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = {ROOT / name for name in listing.split("\0") if name}
    return sorted(path for path in paths if path.is_file())


def requirement_name(requirement: str) -> str:
    """Return the distribution name of a requirement string: ``ds-spec>=0.1,<0.2`` gives ``ds-spec``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise ValueError(f"expected a requirement such as 'name>=1', got {requirement!r}")
    return re.sub(r"[._]+", "-", found.group(0)).lower()


def python_blocks(markdown: str) -> list[str]:
    """Return the ``python`` code blocks of a Markdown text, in order."""
    return _FENCE.findall(markdown)


def changelog_section(changelog: str, version: str) -> str:
    """Return the body that describes ``version``: its own section, else ``[Unreleased]``, else ``""``."""
    sections = {found["name"]: found["body"] for found in _SECTION.finditer(changelog)}
    return sections.get(version, sections.get("Unreleased", ""))
