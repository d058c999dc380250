"""Which files a task is made of: the code that a config names, with the modules beside it that it imports, and data.

Nothing is imported to find out: a source is parsed for its imports, and only modules in its own folder or in the
config's folder are followed. What is installed elsewhere is named, not followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from dora_rl.envs.builtins import NAMES
from dora_rl.envs.config import DataConfig

_DATA = {".jsonl", ".json", ".parquet"}


def code_files(names: Iterable[str], folder: Path) -> list[Path]:
    """The sources behind names such as `FILE.py:function` and `module:function`; builtins have none."""
    found: dict[Path, None] = {}
    waiting = [path for name in names for path in _source(name, folder)]
    while waiting:
        path = waiting.pop().resolve()
        if path in found or not path.is_file():
            continue
        found[path] = None
        places = [path.parent, folder.resolve()]
        if path.is_relative_to(places[1]) or any(path.parent == place for place in places):
            waiting += [one for module in _imports(path) for one in _module(module, [str(place) for place in places])]
    return sorted(found)


def data_files(config: DataConfig, folder: Path) -> list[Path]:
    """The files that problems are read from; what comes from a hub or a generator has none."""
    kind, _, rest = config.source.partition(":")
    if kind == "datasets":
        local = folder / rest.partition(":")[0]
        return sorted(path for path in local.rglob("*") if path.is_file()) if local.is_dir() else []
    path = folder / config.source
    return [path] if path.suffix.lower() in _DATA and path.is_file() else []


def data_code(config: DataConfig) -> Iterator[str]:
    """The name of the function that makes the rows, if one does."""
    kind = config.source.partition(":")[0]
    if ":" in config.source and kind not in ("datasets", "reasoning_gym"):
        yield config.source


def _source(name: str, folder: Path) -> Iterator[Path]:
    place, colon, _ = name.rpartition(":")
    if not colon or name in NAMES or name.startswith("format:"):
        return
    if place.endswith(".py"):
        yield folder / place
    else:
        yield from _module(place, [*sys.path, str(folder.resolve())])


def _module(name: str, places: list[str]) -> Iterator[Path]:
    """The source of a module in these places, and of the packages around it."""
    where: list[str] | None = places
    for part in name.split("."):
        spec = None if where is None else PathFinder.find_spec(part, where)
        if spec is None:
            return
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)


def _imports(path: Path) -> Iterator[str]:
    """Names of modules that a source imports; a source that can't be parsed fails when it is used, and says so."""
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
