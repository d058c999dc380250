"""docs/architecture.md names what there is: files, functions, messages, modules and the glossary of `core`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import dora_rl
from dora_rl import core
from dora_rl.runtime.transport import messages

PACKAGE = Path(dora_rl.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")}
FILE = re.compile(r"`([\w/]+\.\w+)`((?:[:,] `[\w.]+`)*)")
"""A file, and the names in it that follow: `file.py`: `Class.method`, `function`."""


def references() -> list[tuple[str, tuple[str, ...]]]:
    found = [(path, tuple(re.findall(r"`([\w.]+)`", names))) for path, names in FILE.findall(PAGE) if "/" in path]
    return [(path, tuple(name for name in names if not name.endswith(".py"))) for path, names in found]


def defined_in(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a module, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("path", "names"), sorted(set(references())))
def test_files_and_functions_on_the_page_exist(path: str, names: tuple[str, ...]) -> None:
    file = PACKAGE / path
    assert file.is_file()
    if names:
        assert set(names) <= defined_in(file)


def test_the_diagram_has_every_message() -> None:
    diagram = SECTIONS["Processes and messages"].partition("\nPaths on this page")[0]
    for union in (messages.ToWorker, messages.FromWorker):
        for message in get_args(union):
            assert re.search(rf"\b{message.__name__}\b", diagram), f"the diagram lacks {message.__name__}"


def test_every_module_of_the_orchestrator_is_listed() -> None:
    listed = set(re.findall(r"^    (\w+) ", SECTIONS["The orchestrator inside"].partition("\nAfter")[0], re.MULTILINE))
    modules = {path.stem for path in (PACKAGE / "orchestrator").glob("*.py")}
    assert listed == modules - {"__init__", "config", "context", "snapshot"}


def test_every_layer_is_listed() -> None:
    layers = SECTIONS["Layers"].partition("\nImports")[0]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"\w+", " ".join(line[:50] for line in layers.splitlines()))) >= packages


def test_the_glossary_is_that_of_core() -> None:
    documented = re.sub(r"\n  ", " ", (core.__doc__ or "").partition("Glossary.")[2])
    wanted = dict(re.findall(r"^- (.+?): (.+)$", documented, re.MULTILINE))
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", SECTIONS["Glossary"], re.MULTILINE)
    assert len(wanted) > 30
    assert dict(rows) == wanted
