"""Loads the code that a config names: `FILE.py:name`, `module:name`, or `FILE.pickle:name` (`pickled_code`).

Relative files are looked for in the config's folder, which is also importable, so that the files of a task can import
each other. A name that can't be loaded is the user's mistake, whatever the file does when it is imported.
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
from dora_rl.envs import pickled_code


def named_object(name: str, folder: Path) -> Any:
    """The object that `FILE.py:name` or `module:name` names."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise ConfigError(f"'{name}' names no code: write FILE.py:function or module:function")
    importable(folder)
    if source.endswith(pickled_code.SUFFIX):
        return _pickled(folder / source, attribute)
    module = _file(folder / source) if source.endswith(".py") else _module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"'{name}': {source} has no '{attribute}'")
        found = getattr(found, part)
    return found


def importable(folder: Path) -> None:
    """Make the modules in a folder importable, after all others so that they shadow none."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error as one short line, even if its text is arbitrary or raises when it is read."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    line = line.encode("utf-8", "replace").decode("utf-8")
    return line if len(line) <= limit else line[: limit - 3] + "..."


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


def _pickled(path: Path, name: str) -> Any:
    stored = pickled_code.read(path)
    for folder in stored.folders:
        importable(Path(folder))
    try:
        return pickled_code.load(stored)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"cannot load the function '{name}' from {path}: {one_line(error)}") from error
