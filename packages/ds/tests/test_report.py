"""``ds report`` says what is there and what is not, for people and for programs."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import rich.console
from typer.testing import CliRunner

from ds import cli, report


def test_json_holds_every_section() -> None:
    result = CliRunner().invoke(cli.app, ["report", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert list(facts) == ["packages", "libraries", "machine", "devices", "communication", "tools"]
    assert facts["packages"]["ds"] == importlib.metadata.version("ds")
    assert facts["libraries"]["torch"] == importlib.metadata.version("torch")
    assert facts["machine"]["memory_bytes"] > facts["machine"]["memory_available_bytes"] > 0
    assert facts["machine"]["python"] == sys.version.split()[0]
    assert "gloo" in facts["communication"]["backends"]


def test_what_is_missing_is_said() -> None:
    assert report.version_of("no-such-distribution-as-this") == "not installed"


def test_no_line_is_wider_than_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    console = rich.console.Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        monkeypatch.setattr(rich.console, "Console", lambda: console)
        facts = {
            "packages": {"ds": "0.1.0", "ds-x": "not installed"},
            "machine": {"system": "s" * 200, "memory_bytes": 3 * 2**30, "cores": 2},
            "communication": {"backends": ["gloo", "nccl"]},
        }
        report.show_report(facts)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "3.0 GiB" in shown
    assert "gloo, nccl" in shown
    assert "not installed" in shown


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("memory_bytes", 2**29, "0.5 GiB"),
        ("backends", ["gloo"], "gloo"),
        ("backends", [], "none"),
        ("torch_cuda", None, "none"),
        ("cores", 2, "2"),
    ],
)
def test_facts_as_people_read_them(name: str, value: object, shown: str) -> None:
    assert report.shown_fact(name, value) == shown


def test_cpu_is_named_where_the_kernel_does_not(tmp_path: Path) -> None:
    assert report._cpu_name(tmp_path / "nothing")
    (tmp_path / "cpuinfo").write_text("flags : x\nmodel name\t: Some CPU @ 3 GHz\n")
    assert report._cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"


def test_devices_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert report._nvidia_driver() == "not found"
    assert report._nvidia_devices() == {}
