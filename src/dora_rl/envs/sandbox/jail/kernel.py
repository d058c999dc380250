"""System calls for which Python has no function."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22


def syscall(number: int, *arguments: object) -> int:
    """Make a system call; an error is raised as `OSError`."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, *arguments: object) -> None:
    """Change an attribute of this process."""
    given = [
        argument if isinstance(argument, ctypes.c_void_p) else ctypes.c_ulong(int(str(argument)))
        for argument in arguments
    ]
    padded = given + [ctypes.c_ulong(0)] * (4 - len(given))
    if _libc.prctl(ctypes.c_int(option), *padded) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def drop_capabilities() -> None:
    """Drop all capabilities, so that even root can't raise its limits again."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    nothing = (ctypes.c_uint32 * 6)()
    if _libc.capset(ctypes.byref(Header(0x20080522, 0)), nothing) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
