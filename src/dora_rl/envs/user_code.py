"""Code that a config names: `FILE.py:name` or `module:name`.

The config's folder is where relative files are looked for, and is importable, so that a task's files find each other.
A name that can't be had is the user's mistake, whatever the file does when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dora_rl.core.errors import ConfigError


def named_object(name: str, folder: Path) -> Any:
    """What `FILE.py:name` or `module:name` stands for."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"'{name}' names no code: write FILE.py:function or module:function")
    importable(folder)
    module = _file(folder / place) if place.endswith(".py") else _module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"'{name}': {place} has no '{attribute}'")
        found = getattr(found, part)
    return found


def importable(folder: Path) -> None:
    """Make the modules in a folder importable, behind all others so that none is shadowed."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error in one short line; its own text may be anything, or raise itself."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    said = said.encode("utf-8", "replace").decode("utf-8")
    return said if len(said) <= limit else said[: limit - 3] + "..."


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"cannot import '{name}': {one_line(error)}") from error


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"dora_rl_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importable(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(f"cannot import {path}: {one_line(error)}") from error
    return module
