"""The size and the manners of library code: what a reader meets when opening any file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

import workspace

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "base", "manager"}

FILES = [path for _, path in workspace.source_files()]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(workspace.ROOT)))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


@each_file
def test_file_can_be_read_in_one_sitting(path) -> None:
    assert path.read_text().count("\n") <= MAX_FILE_LINES
    assert path.stem.strip("_") not in VAGUE_NAMES


@each_file
def test_functions_are_short(path) -> None:
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in functions(ast.parse(path.read_text()))
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@each_file
def test_library_code_neither_asserts_nor_prints(path) -> None:
    offences = [
        f"line {node.lineno}: {'assert' if isinstance(node, ast.Assert) else 'print'}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
    ]
    assert offences == []


@each_file
def test_module_says_what_it_is(path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@each_file
def test_library_code_sets_no_logging_up(path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            assert called != "logging.basicConfig", f"line {node.lineno}: handlers belong to the application"
            assert not (called == "logging.getLogger" and not node.args), (
                f"line {node.lineno}: the root logger"
            )
