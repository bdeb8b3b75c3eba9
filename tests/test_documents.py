"""What the documents say compiles, leads somewhere, and names no single machine."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import workspace

TRACKED = workspace.tracked_files()
MARKDOWN = [path for path in TRACKED if path.suffix == ".md"]
TEXT = [
    path
    for path in TRACKED
    if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".json", ".cpp", ".cu", ".h", ""}
    and path.name != "uv.lock"
]

# Put together from pieces, so that this file does not name what it looks for.
MACHINE_FOLDERS = [rf"(?<![\w.~<>-])/{folder}/" for folder in ("work", "root", "home", "Users", "farm")]
REGISTRY_HOSTS = [
    re.escape(".".join(host))
    for host in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("deb", "debian", "org"),
    )
]
FORBIDDEN = re.compile("|".join(MACHINE_FOLDERS + REGISTRY_HOSTS))

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(workspace.ROOT))


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_python_examples_compile(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, block in enumerate(workspace.python_blocks(path.read_text())):
            compile(block, f"{name_of(path)}, python block {index + 1}", "exec")


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_relative_links_lead_to_files(path: Path) -> None:
    targets = _LINK.findall(_CODE.sub("", path.read_text()))
    local = [target.partition("#")[0] for target in targets if "://" not in target and target[0] != "#"]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_nothing_names_a_machine_path_or_a_registry_host() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in TEXT
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def test_examples_are_found_in_markdown() -> None:
    text = "a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n```python title=t\ny = 2\n```\n"
    assert workspace.python_blocks(text) == ["x = 1\n", "y = 2\n"]


def test_changelog_section_prefers_the_version_over_unreleased() -> None:
    text = "# C\n\n## [Unreleased]\n\n- new\n\n## [0.1.0] - 2026-12-01\n\n- old\n\n## [0.0.1]\n\n- older\n"
    assert workspace.changelog_section(text, "0.1.0").strip() == "- old"
    assert workspace.changelog_section(text, "0.0.1").strip() == "- older"
    assert workspace.changelog_section(text, "9.9.9").strip() == "- new"
    assert workspace.changelog_section("# C\n", "0.1.0") == ""
