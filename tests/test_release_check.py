"""The release check notices what would break for someone who installs one package alone."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import release_check
import workspace
from workspace import Member

WHEEL = ["ds_toy/__init__.py", "ds_toy/py.typed", "ds_toy-0.1.0.dist-info/licenses/LICENSE"]
SDIST = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/ds_toy/py.typed"]


def toy(path: Path, **project: object) -> Member:
    return Member(path=path, project={"name": "ds-toy", "version": "0.1.0", **project})


def write_archives(dist: Path, *, wheel: list[str], sdist: list[str]) -> None:
    with zipfile.ZipFile(dist / "ds_toy-0.1.0-py3-none-any.whl", "w") as archive:
        for name in wheel:
            archive.writestr(name, "")
    with tarfile.open(dist / "ds_toy-0.1.0.tar.gz", "w:gz") as archive:
        for name in sdist:
            archive.addfile(tarfile.TarInfo(f"ds_toy-0.1.0/{name}"), io.BytesIO())


def test_complete_archives_pass(tmp_path: Path) -> None:
    write_archives(tmp_path, wheel=WHEEL, sdist=SDIST)
    release_check.check_archives(toy(tmp_path), tmp_path)


@pytest.mark.parametrize("missing", WHEEL)
def test_a_file_missing_from_the_wheel_is_named(tmp_path: Path, missing: str) -> None:
    write_archives(tmp_path, wheel=[name for name in WHEEL if name != missing], sdist=SDIST)
    with pytest.raises(release_check.CheckError, match=missing):
        release_check.check_archives(toy(tmp_path), tmp_path)


@pytest.mark.parametrize("missing", SDIST)
def test_a_file_missing_from_the_source_distribution_is_named(tmp_path: Path, missing: str) -> None:
    write_archives(tmp_path, wheel=WHEEL, sdist=[name for name in SDIST if name != missing])
    with pytest.raises(release_check.CheckError, match=missing):
        release_check.check_archives(toy(tmp_path), tmp_path)


def test_a_foreign_folder_in_the_wheel_is_named(tmp_path: Path) -> None:
    write_archives(tmp_path, wheel=[*WHEEL, "tests/test_toy.py"], sdist=SDIST)
    with pytest.raises(release_check.CheckError, match=r"\['tests'\]"):
        release_check.check_archives(toy(tmp_path), tmp_path)


def test_no_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(release_check.CheckError, match="expected one ds_toy"):
        release_check.check_archives(toy(tmp_path), tmp_path)


def test_a_version_without_a_changelog_entry_is_named(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n")
    with pytest.raises(release_check.CheckError, match=r"0\.1\.0"):
        release_check.check_metadata(toy(tmp_path))
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n")
    release_check.check_metadata(toy(tmp_path))


def test_a_dynamic_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(release_check.CheckError, match="static version"):
        release_check.check_metadata(toy(tmp_path, version=None))


def test_a_failing_command_shows_its_last_lines() -> None:
    with pytest.raises(release_check.CheckError, match=r"exit status 3\nfirst\nlast"):
        release_check.run(sys.executable, "-c", "import sys; print('first'); print('last'); sys.exit(3)")


def test_needs_follow_siblings_to_the_end() -> None:
    low = Member(path=Path(), project={"name": "ds-low", "dependencies": ["torch>=2"]})
    middle = Member(path=Path(), project={"name": "ds-middle", "dependencies": ["ds-low>=0.1,<0.2"]})
    high = Member(path=Path(), project={"name": "ds-high", "dependencies": ["ds-middle>=0.1,<0.2", "rich"]})
    light = Member(path=Path(), project={"name": "ds-light", "dependencies": ["rich"]})
    by_name = {member.name: member for member in (low, middle, high, light)}
    assert release_check.siblings_needed(high, by_name) == {"ds-low", "ds-middle", "ds-high"}
    assert release_check.needs_torch(high, by_name)
    assert not release_check.needs_torch(light, by_name)


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("ds-spec>=0.1,<0.2", "ds-spec"), ("Some_Name.x[extra]>1 ; python_version>'3'", "some-name-x")],
)
def test_requirement_names_are_normalised(requirement: str, name: str) -> None:
    assert workspace.requirement_name(requirement) == name
