"""seccomp: a filter that refuses system calls with an effect outside this process.

It also refuses every call that is newer than the table below, since those have not been reviewed. No process can be
started, so the pid of this one is never reused, and signals can be sent only to it.

Pairs of UNIX sockets are allowed, since every event loop of asyncio makes one: they connect the process with itself.
The kernel does not count data in pipes and socket pairs as memory of the process, so their buffers must stay small:
pipes can't be enlarged, socket options can't be set, and neither accepts memory pages, or descriptors that are closed
while in flight.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

from dora_rl.envs.sandbox.jail.kernel import PR_SET_PDEATHSIG, PR_SET_SECCOMP, prctl

_LAST = 450
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD = 0x10000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
_F_SETPIPE_SZ = 1031
_AF_UNIX = 1
DENIED = errno.EPERM
"""Error number that refused calls return."""

# name: number on x86_64, number on aarch64
REFUSED: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "network": {
        "socket": (41, 198),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
    },
    "files": {
        "truncate": (76, 45),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "move_mount": (429, 429),
        "open_tree": (428, 428),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "fanotify_init": (300, 262),
        "inotify_init": (253, None),
        "inotify_init1": (294, 26),
        "inotify_add_watch": (254, 27),
        "fanotify_mark": (301, 263),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "acct": (163, 89),
    },
    "memory": {
        "io_setup": (206, 0),
        "setsockopt": (54, 208),
        "sendmsg": (46, 211),
        "sendmmsg": (307, 269),
        "splice": (275, 76),
        "vmsplice": (278, 75),
        "tee": (276, 77),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgctl": (71, 187),
        "semget": (64, 190),
        "semop": (65, 193),
        "semctl": (66, 191),
        "semtimedop": (220, 192),
        "mq_open": (240, 180),
        "mq_unlink": (241, 181),
        "userfaultfd": (323, 282),
    },
    "processes": {
        "fork": (57, None),
        "vfork": (58, None),
        "execve": (59, 221),
        "execveat": (322, 281),
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "process_madvise": (440, 440),
        "process_mrelease": (448, 448),
        "pidfd_open": (434, 434),
        "pidfd_getfd": (438, 438),
        "pidfd_send_signal": (424, 424),
        "tkill": (200, 130),
        "rt_sigqueueinfo": (129, 138),
        "kcmp": (312, 272),
        "setns": (308, 268),
        "unshare": (272, 97),
        "setpriority": (141, 140),
        "sched_setscheduler": (144, 119),
        "sched_setparam": (142, 118),
        "sched_setattr": (314, 274),
        "sched_setaffinity": (203, 122),
        "ioprio_set": (251, 30),
        "migrate_pages": (256, 238),
        "move_pages": (279, 239),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "reboot": (169, 142),
        "syslog": (103, 116),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "clock_adjtime": (305, 266),
        "adjtimex": (159, 171),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "iopl": (172, None),
        "ioperm": (173, None),
        "vhangup": (153, 58),
    },
}
# Landlock does not cover these calls: they succeed and change nothing, so that code that copies files runs.
IGNORED: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
_CLONE, _CLONE3, _KILL_ONE, _TGKILL, _TGSIGQUEUE = (56, 220), (435, 435), (62, 129), (234, 131), (297, 240)
_PRLIMIT, _PRCTL, _FCNTL, _IOCTL = (302, 261), (157, 167), (72, 25), (16, 29)
_SOCKETPAIR = (53, 199)


def supported() -> bool:
    """Whether the table has the call numbers of this machine."""
    return platform.machine() in _MACHINES and struct.calcsize("P") == 8


def install(guards: Iterable[str]) -> None:
    """Refuse the calls that these guarantees forbid, from now on."""
    program = _program(set(guards))
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    whole = Program(len(program), ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(whole)))


def _program(guards: set[str]) -> list[bytes]:
    column, architecture = _MACHINES[platform.machine()]
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
    code += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _LAST + 1, 0, 1), _refuse(errno.ENOSYS)]
    for guard in sorted(guards & REFUSED.keys()):
        for numbers in REFUSED[guard].values():
            code += _when(numbers[column], [_refuse(DENIED)])
    if "files" in guards:
        for numbers in IGNORED.values():
            code += _when(numbers[column], [_refuse(0)])
    if "network" in guards:
        code += _when(_SOCKETPAIR[column], _unless(0, _AF_UNIX))
    if "processes" in guards:
        code += _alone(column)
    commands = [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX] if "processes" in guards else []
    commands += [_F_SETPIPE_SZ] if "memory" in guards else []
    if commands:
        code += _when(_FCNTL[column], _if_any(1, commands))
    return [*code, _step(_RETURN, _ALLOW)]


def _alone(column: int) -> list[bytes]:
    """Allow threads but no processes, and signals and limits only for this process; keep its death signal."""
    thread = [_argument(0), _step(_ANY_BIT, _CLONE_THREAD, 0, 1), _step(_RETURN, _ALLOW), _refuse(DENIED)]
    code = _when(_CLONE[column], thread)
    # On ENOSYS the C library falls back to clone, whose flags the filter can see.
    code += _when(_CLONE3[column], [_refuse(errno.ENOSYS)])
    for call in (_KILL_ONE, _TGKILL, _TGSIGQUEUE):
        code += _when(call[column], _unless(0, os.getpid()))
    code += _when(_PRLIMIT[column], _unless(0, 0))
    code += _when(_PRCTL[column], _if_any(0, [PR_SET_PDEATHSIG]))
    return code + _when(_IOCTL[column], _if_any(1, [_FIOSETOWN, _SIOCSPGRP]))


def _when(number: int | None, then: list[bytes]) -> list[bytes]:
    """Instructions for one call, which end in a decision. Calls that the machine does not have need none."""
    return [] if number is None else [_step(_EQUAL, number, 0, len(then)), *then]


def _unless(index: int, value: int) -> list[bytes]:
    allowed = _step(_RETURN, _ALLOW)
    return [_argument(index), _step(_EQUAL, value, 0, 1), allowed, _refuse(DENIED)]


def _if_any(index: int, values: list[int]) -> list[bytes]:
    tests = [step for value in values for step in (_step(_EQUAL, value, 0, 1), _refuse(DENIED))]
    return [_argument(index), *tests, _step(_RETURN, _ALLOW)]


def _argument(index: int) -> bytes:
    """Load the lower half of an argument: the kernel reads only that half of the arguments tested here."""
    return _step(_LOAD, _ARGUMENTS + 8 * index)


def _refuse(code: int) -> bytes:
    return _step(_RETURN, _ERRNO | code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
