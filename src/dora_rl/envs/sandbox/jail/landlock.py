"""Landlock: only files beneath a few paths can be read or written; nothing else can be opened, listed, made or removed.

Landlock hides the contents of files and the names in folders, but not that a path exists, nor its size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from dora_rl.envs.sandbox.jail.kernel import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_FIFO, _MAKE_SYM = (
    1 << 4,
    1 << 5,
    1 << 7,
    1 << 8,
    1 << 10,
    1 << 12,
)
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_READ = _READ_FILE | _READ_DIR
_WRITE = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE
# Number of rights by version of the kernel's interface: 13 at first, then refer, truncate, and ioctl on devices.
_KNOWN = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST = 16


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Version of the kernel's interface; an `OSError` if the kernel has no Landlock."""
    return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def confine(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process to the files beneath these paths; paths that do not exist are left out."""
    handled = (1 << _KNOWN.get(version(), _LATEST)) - 1
    ruleset = syscall(_CREATE, ctypes.byref(ctypes.c_uint64(handled)), ctypes.c_size_t(8), ctypes.c_uint32(0))
    for paths, rights in ((readable, _READ), (writable, _WRITE)):
        for path in paths:
            _allow(ruleset, path, rights & handled)
    syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights &= rights if os.path.isdir(path) else _OF_FILES  # noqa: PTH112
    rule = _Beneath(rights, opened)
    syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    os.close(opened)
