"""The files of a task: the code that a config names, the local modules that this code imports, and the data.

Nothing is imported to find them: each source is parsed for its imports, and only modules in its folder or in the
config's folder are followed. Modules that are installed elsewhere are named but not followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from dora_rl.envs.builtins import NAMES
from dora_rl.envs.config import DataConfig
from dora_rl.envs.pickled_code import SUFFIX

_DATA = {".jsonl", ".json", ".parquet"}


def code_files(names: Iterable[str], folder: Path) -> list[Path]:
    """The source files of names such as `FILE.py:function` and `module:function`; builtins have none."""
    found: dict[Path, None] = {}
    waiting = [path for name in names for path in _source(name, folder)]
    while waiting:
        path = waiting.pop().resolve()
        if path in found or not path.is_file():
            continue
        found[path] = None
        search = [path.parent, folder.resolve()]
        if path.is_relative_to(search[1]) or path.parent in search:
            waiting += [one for module in _imports(path) for one in _module(module, [str(each) for each in search])]
    return sorted(found)


def data_files(config: DataConfig, folder: Path) -> list[Path]:
    """The files that problems are read from; datasets from a hub or a generator have none."""
    kind, _, rest = config.source.partition(":")
    if kind == "datasets":
        local = folder / rest.partition(":")[0]
        return sorted(path for path in local.rglob("*") if path.is_file()) if local.is_dir() else []
    path = folder / config.source
    return [path] if path.suffix.lower() in _DATA and path.is_file() else []


def data_code(config: DataConfig) -> Iterator[str]:
    """The name of the function that returns the rows, if there is one."""
    kind = config.source.partition(":")[0]
    if ":" in config.source and kind not in ("datasets", "reasoning_gym"):
        yield config.source


def _source(name: str, folder: Path) -> Iterator[Path]:
    module, colon, _ = name.rpartition(":")
    if not colon or name in NAMES or name.startswith("format:"):
        return
    if module.endswith((".py", SUFFIX)):
        yield folder / module
    else:
        yield from _module(module, [*sys.path, str(folder.resolve())])


def _module(name: str, search: list[str]) -> Iterator[Path]:
    """The source of a module in these folders, and of the packages around it."""
    where: list[str] | None = search
    for part in name.split("."):
        spec = None if where is None else PathFinder.find_spec(part, where)
        if spec is None:
            return
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)


def _imports(path: Path) -> Iterator[str]:
    """Names of modules that a source imports; a source that can't be parsed is reported when it is used."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ([module] if module else [])
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
