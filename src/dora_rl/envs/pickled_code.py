"""Code without an import path, in files: lambdas, closures, and what a script or a notebook defines.

The process that starts a run writes them with cloudpickle; the processes of the run, which may be started again much
later, read them. Invariants:
- only a file is ever unpickled, never bytes that came over a connection;
- the name of a file is the digest of its content, and a config has that name: a file with any other content is refused
  before anything of it is executed.

Functions are stored by value, with what they refer to in their own script or module; other modules that they import are
named only, so the folders in which the writer finds its modules are stored with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from dora_rl.core.errors import ConfigError, UserError

SUFFIX = ".pickle"


class StoredCode(NamedTuple):
    """The content of a file that has the digest of its name."""

    folders: tuple[str, ...]
    """Where the process that wrote it finds its modules."""
    pickled: bytes


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    python: str
    folders: tuple[str, ...]


def store(code: Any, folder: Path) -> Path:
    """Write code to a file in this folder."""
    if importlib.util.find_spec("cloudpickle") is None:
        raise UserError("functions without an import path need cloudpickle: pip install 'dora-rl[train]'")
    import cloudpickle

    with contextlib.ExitStack() as undo:
        for module in _own_modules(code):
            cloudpickle.register_pickle_by_value(module)
            undo.callback(cloudpickle.unregister_pickle_by_value, module)
        pickled = cloudpickle.dumps(code)
    folders = tuple(str(Path(entry).resolve()) for entry in sys.path)
    content = msgspec.json.encode(_Header(python=_python(), folders=folders)) + b"\n" + pickled
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_digest(content)}{SUFFIX}"
    path.write_bytes(content)
    return path


def read(path: Path) -> StoredCode:
    """Read a file without executing anything of it; refuse it if it has changed since it was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if _digest(content) != path.stem:
        raise ConfigError(
            f"{path} has changed since the run was started, and is not executed: put it back, or start a new run"
        )
    line, _, pickled = content.partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=_Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} was not written by this version of dora-rl: start a new run") from error
    if header.python != _python():
        raise ConfigError(f"{path} has a function of Python {header.python}, but this is {_python()}: use the former")
    return StoredCode(header.folders, pickled)


def load(stored: StoredCode) -> Any:
    """The function or class; loading it can raise anything, as an import can."""
    import cloudpickle

    return cloudpickle.loads(stored.pickled)


def _own_modules(code: Any) -> list[ModuleType]:
    """The modules that define the code, unless they are installed: workers may not find them, or find other ones."""
    parts = [code, getattr(code, "func", None), getattr(code, "__self__", None)]  # those of a partial or a method
    names = {getattr(part, "__module__", None) or "" for part in parts} - {"__main__"}
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = []
    for module in (sys.modules[name] for name in sorted(names & sys.modules.keys())):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not any(Path(file).is_relative_to(folder) for folder in installed):
            found.append(module)
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _python() -> str:
    """Bytecode differs between minor versions."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
