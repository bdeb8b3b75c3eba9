"""Would every distribution work for a stranger who installs it alone?

Builds wheels and source distributions without workspace sources, looks inside them, installs each wheel
into its own empty environment (siblings from the fresh build, everything else as locked), and there runs
``uv pip check``, an import with warnings as errors, the command-line entry points and the first ``python``
block of the package's README.

    uv run python tools/release_check.py [--package NAME ...] [--quick] [--keep FOLDER]

``--package`` builds that package and the siblings it needs, and checks it alone. ``--quick`` builds and
inspects everything, but installs only what does not need torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import workspace
from workspace import Member

COMMAND_TIMEOUT_S = 600
EXAMPLE_TIMEOUT_S = 180


class CheckError(Exception):
    """A release check did not hold; the text says what was expected and what was found."""


def expect(holds: bool, problem: str) -> None:
    """Raise CheckError with ``problem`` unless ``holds``."""
    if not holds:
        raise CheckError(problem)


def run(*command: str | Path, cwd: Path = workspace.ROOT, timeout_s: int = COMMAND_TIMEOUT_S) -> str:
    """Run a command without the caller's environment of Python; return its output.

    Raises:
        CheckError: it failed or took longer than ``timeout_s``; the text ends with its last lines.
    """
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    text = [str(part) for part in command]
    try:
        done = subprocess.run(
            text,
            cwd=cwd,
            env={**inherited, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{' '.join(text)}: still running after {timeout_s} s") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise CheckError(f"{' '.join(text)}: exit status {done.returncode}\n{tail}")
    return done.stdout


def siblings_needed(member: Member, by_name: dict[str, Member]) -> set[str]:
    """Return the names of ``member`` and of every workspace member it depends on, directly or not."""
    names = {member.name}
    for requirement in member.dependencies:
        name = workspace.requirement_name(requirement)
        if name in by_name:
            names |= siblings_needed(by_name[name], by_name)
    return names


def needs_torch(member: Member, by_name: dict[str, Member]) -> bool:
    """Say whether installing ``member`` brings torch."""
    requirements = [item for name in siblings_needed(member, by_name) for item in by_name[name].dependencies]
    return "torch" in {workspace.requirement_name(item) for item in requirements}


def check_metadata(member: Member) -> None:
    """Check what the source tree promises: a static version that the changelog describes."""
    expect(
        member.version is not None,
        f"{member.path.name}/pyproject.toml: expected a static version, got a dynamic one; write `version =`",
    )
    changes = workspace.changelog_section((member.path / "CHANGELOG.md").read_text(), str(member.version))
    expect(
        any(line.startswith("- ") for line in changes.splitlines()),
        f"{member.path.name}/CHANGELOG.md: expected an entry under [{member.version}] or [Unreleased], "
        "found none; write one line per change that a user notices",
    )


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file in ``folder`` that matches."""
    found = sorted(folder.glob(pattern))
    expect(len(found) == 1, f"expected one {pattern} in {folder}, got {[path.name for path in found]}")
    return found[0]


def wheel_of(member: Member, dist: Path) -> Path:
    """Return the built wheel of ``member``."""
    return only_file(dist, f"{member.import_name}-{member.version}-*.whl")


def check_archives(member: Member, dist: Path) -> None:
    """Check that wheel and source distribution hold what they should and nothing foreign."""
    wheel = wheel_of(member, dist)
    inside = set(zipfile.ZipFile(wheel).namelist())
    info = f"{member.import_name}-{member.version}.dist-info"
    for wanted in (
        f"{member.import_name}/__init__.py",
        f"{member.import_name}/py.typed",
        f"{info}/licenses/LICENSE",
    ):
        expect(wanted in inside, f"{wheel.name}: expected {wanted} inside, not there")
    tops = {name.partition("/")[0] for name in inside} - {member.import_name, info}
    expect(
        not tops,
        f"{wheel.name}: expected only {member.import_name} and {info} inside, got also {sorted(tops)}",
    )

    sdist = only_file(dist, f"{member.import_name}-{member.version}.tar.gz")
    with tarfile.open(sdist) as archive:
        names = set(archive.getnames())
    for wanted in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        f"src/{member.import_name}/py.typed",
    ):
        path = f"{member.import_name}-{member.version}/{wanted}"
        expect(path in names, f"{sdist.name}: expected {wanted} inside, not there")


def write_constraints(dist: Path, built: list[Member]) -> Path:
    """Write what pip may choose: siblings from this build and never from an index, the rest as locked."""
    locked = run(
        "uv", "export", "--frozen", "--no-hashes", "--no-emit-workspace", "--no-default-groups", "--no-header"
    )
    fresh = [f"{member.name} @ {wheel_of(member, dist).as_uri()}" for member in built]
    path = dist / "constraints.txt"
    path.write_text(locked + "\n".join(fresh) + "\n")
    return path


def check_installed(member: Member, dist: Path, constraints: Path) -> None:
    """Install the wheel alone into an empty environment and use it there as a stranger would."""
    with tempfile.TemporaryDirectory(prefix=f"{member.name}-") as folder:
        home = Path(folder)
        run("uv", "venv", "--quiet", "--no-project", "--python", sys.executable, home / "venv")
        python = home / "venv" / "bin" / "python"
        # By file, not by name: `ds` on the public index is another project.
        run("uv", "pip", "install", "--python", python, "--constraint", constraints, wheel_of(member, dist))
        run("uv", "pip", "check", "--python", python)
        run(python, "-I", "-W", "error", "-c", f"import {member.import_name}", cwd=home)
        for script in member.project.get("scripts", {}):
            run(python.with_name(script), "--help", cwd=home)
        for block in workspace.python_blocks((member.path / "README.md").read_text())[:1]:
            (home / "example.py").write_text(block)
            run(python, "-W", "error", home / "example.py", cwd=home, timeout_s=EXAMPLE_TIMEOUT_S)


def build(members: list[Member], dist: Path, step: Callable[[str], None]) -> None:
    """Build wheel and source distribution of every member into ``dist``."""
    for member in members:
        step(f"{member.name}: build")
        run("uv", "build", "--no-sources", "--quiet", "--package", member.name, "--out-dir", dist)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that announces the next step: a bar when a person is watching, else one line each."""
    if not sys.stdout.isatty():
        counter = iter(range(1, total + 1))
        yield lambda text: print(f"[{next(counter)}/{total}] {text}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=text)
        bar.update(task, completed=total, description="done")


def parse_arguments(names: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--package", action="append", choices=names, help="check this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="install only what does not need torch")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the built files in this folder")
    return parser.parse_args()


def check_all(checked: list[Member], built: list[Member], installed: list[Member], dist: Path) -> list[str]:
    """Run every check; return the problems, each beginning with its package."""
    problems: list[str] = []

    def attempt(check: Callable[..., None], member: Member, *arguments: Path) -> None:
        try:
            check(member, *arguments)
        except CheckError as error:
            problems.append(f"{member.name}: {error}")

    with progress(len(built) + len(checked) + len(installed)) as step:
        build(built, dist, step)
        constraints = write_constraints(dist, built)
        for member in checked:
            step(f"{member.name}: metadata, wheel, source distribution")
            attempt(check_metadata, member)
            attempt(check_archives, member, dist)
        for member in installed:
            step(f"{member.name}: install alone, import, example")
            attempt(check_installed, member, dist, constraints)
    return problems


def main() -> int:
    """Check the chosen packages and print a summary; 1 when any check did not hold."""
    by_name = {member.name: member for member in workspace.members()}
    arguments = parse_arguments(list(by_name))
    checked = [by_name[name] for name in arguments.package or by_name]
    needed = set().union(*(siblings_needed(member, by_name) for member in checked))
    built = [member for member in by_name.values() if member.name in needed]
    installed = [member for member in checked if not (arguments.quick and needs_torch(member, by_name))]
    with tempfile.TemporaryDirectory(prefix="ds-release-") as folder:
        dist = arguments.keep.resolve() if arguments.keep else Path(folder)
        dist.mkdir(parents=True, exist_ok=True)
        try:
            problems = check_all(checked, built, installed, dist)
        except CheckError as error:  # the build itself: nothing can be said of the rest
            problems = [str(error)]
    for problem in problems:
        print(f"\nFAILED {problem}")
    verdict = f"{len(problems)} problem(s)" if problems else "all hold"
    print(f"\nrelease check: {len(checked)} package(s), {len(installed)} installed alone: {verdict}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
