"""The README's script and configuration are the files beside this one, and they run as the README says."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ds.launch import run_script

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("file", "language"), [("train.py", "python"), ("ds_config.json", "json")])
def test_readme_shows_the_file(file: str, language: str) -> None:
    assert f"```{language}\n{(HERE / file).read_text()}```" in README


def test_readme_has_every_package_with_its_status() -> None:
    rows = dict(re.findall(r"^\| \[(ds[\w-]*)\]\(.*\| (\w+) \|$", README, re.MULTILINE))
    expected = {}
    for project in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "kernels/pyproject.toml"]:
        name = tomllib.loads(project.read_text())["project"]["name"]
        status = re.search(r"^Status: (\w+)", (project.parent / "README.md").read_text(), re.MULTILINE)
        assert status is not None, name
        expected[name] = status[1]
    assert rows == expected


@pytest.mark.slow
def test_quickstart_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines: list[str] = []
    code = run_script(
        str(HERE / "train.py"),
        ["10"],
        num_ranks=2,
        on_line=lambda rank, stream, line: lines.append(f"{rank} {stream} {line}"),
    )
    said = "\n".join(lines)
    sys.stdout.write(said)
    assert code == 0, said
    first, last = (
        float(loss) for loss in re.findall(r"^0 stdout step \d+  loss ([\d.]+)", said, re.MULTILINE)
    )
    assert last < first
    weights = load_file(tmp_path / "runs/quickstart/model.safetensors")
    assert weights["tokens.weight"].shape == (2048, 192)
