"""Who may know whom, and who may touch the outside world."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import workspace

LAYERS = "layers"

# Prefix of the touched name -> where it may be touched (folders or files, relative to the root), and why.
RESERVED = {
    "torch.distributed": ("packages/ds-comm/src", "packages/ds/src/ds/launch"),
    "torch.cuda": ("kernels/src",),
    "os.environ": ("packages/ds/src", "packages/ds-comm/src/ds_comm"),
    "os.getenv": ("packages/ds/src", "packages/ds-comm/src/ds_comm"),
    "torch.load": (),
}


def test_layers_contract_names_every_member_once() -> None:
    contracts = workspace.root_table()["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["id"] == LAYERS)["layers"]
    named = [name.strip() for layer in layers for name in layer.split("|")]
    assert sorted(named) == sorted(member.import_name for member in workspace.members())


def test_imports_keep_the_contracts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(workspace.ROOT)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    status = lint_imports(no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_declared_dependencies_follow_the_layers() -> None:
    contracts = workspace.root_table()["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["id"] == LAYERS)["layers"]
    height = {name.strip(): -index for index, layer in enumerate(layers) for name in layer.split("|")}
    for member in workspace.members():
        for requirement in member.dependencies:
            sibling = workspace.requirement_name(requirement).replace("-", "_")
            if sibling in height:
                assert height[sibling] < height[member.import_name], f"{member.name} depends on {requirement}"


def touched_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import, and of every attribute chain that starts at an import."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        chain: list[str] = []
        link: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(link, ast.Attribute):
            chain.append(link.attr)
            link = link.value
        if chain and isinstance(link, ast.Name) and link.id in aliases:
            yield node.lineno, ".".join([aliases[link.id], *reversed(chain)])


def is_under(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(workspace.ROOT / place) for place in places)


@pytest.mark.parametrize("reserved", RESERVED)
def test_reserved_names_are_touched_only_where_the_design_says(reserved: str) -> None:
    found = [
        f"{path.relative_to(workspace.ROOT)}:{line}: {name}"
        for _, path in workspace.source_files()
        if not is_under(path, RESERVED[reserved])
        for line, name in touched_names(ast.parse(path.read_text()))
        if name == reserved or name.startswith(reserved + ".")
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import nn",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\nt.distributed.barrier()",
    ],
)
def test_a_touch_is_seen_however_it_is_spelled(source: str) -> None:
    assert any(name.startswith("torch.distributed") for _, name in touched_names(ast.parse(source)))
