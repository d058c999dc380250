"""Each rule of the filter of system calls: a rule that is missing, loosened or mistyped fails a test here.

The table below repeats the filter's own on purpose: the filter is compared with it. The filter is checked twice: by an
interpreter of its instructions, for both architectures and every system call, and by the kernel of this machine.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_rl.envs.sandbox import sandbox
from dora_rl.envs.sandbox.jail import seccomp
from dora_rl.envs.sandbox.sandbox import GUARANTEES, Sandbox, SandboxLimits

# guarantee: "name x86_64 aarch64", a dash where the architecture does not have the call
REFUSED = {
    "network": "socket 41 198, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427",
    "files": "truncate 76 45, "
    "setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, "
    "fremovexattr 199 16, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, move_mount 429 429, "
    "open_tree 428 428, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, "
    "name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262, inotify_init 253 -, "
    "inotify_init1 294 26, inotify_add_watch 254 27, fanotify_mark 301 263, quotactl 179 60, quotactl_fd 443 443, "
    "swapon 167 224, swapoff 168 225, acct 163 89",
    "memory": "io_setup 206 0, setsockopt 54 208, sendmsg 46 211, sendmmsg 307 269, splice 275 76, vmsplice 278 75, "
    "tee 276 77, "
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, "
    "msgsnd 69 189, msgctl 71 187, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180, "
    "mq_unlink 241 181, userfaultfd 323 282",
    "processes": "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, ptrace 101 117, process_vm_readv 310 270, "
    "process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448, pidfd_open 434 434, "
    "pidfd_getfd 438 438, pidfd_send_signal 424 424, tkill 200 130, rt_sigqueueinfo 129 138, kcmp 312 272, "
    "setns 308 268, unshare 272 97, setpriority 141 140, sched_setscheduler 144 119, sched_setparam 142 118, "
    "sched_setattr 314 274, sched_setaffinity 203 122, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239, "
    "bpf 321 280, perf_event_open 298 241, keyctl 250 219, add_key 248 217, request_key 249 218, init_module 175 105, "
    "finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, "
    "syslog 103 116, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, "
    "sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, vhangup 153 58",
}
IGNORED = (
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, "
    "utimes 235 -, futimesat 261 -, utimensat 280 88"
)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ME = 4321
OTHER = 17
THREAD = 0x10000
LAST = 450
# Calls decided by their arguments: guarantee, name, numbers, refused arguments, allowed arguments.
DECIDED: list[tuple[str, str, str, list[tuple[int, ...]], list[tuple[int, ...]]]] = [
    ("network", "socketpair", "53 199", [(2,), (0,), (10,), (16,), (30,), (40,)], [(1,)]),
    ("memory", "fcntl", "72 25", [(3, 1031)], [(3, 1032), (3, 3), (3, 4), (3, 1)]),
    ("processes", "fcntl", "72 25", [(3, 8), (3, 10), (3, 15)], [(3, 9), (3, 2), (3, 1030)]),
    ("processes", "clone", "56 220", [(0,), (17,), (0x4000 | 0x100,)], [(THREAD,), (0x3D0F00,)]),
    ("processes", "kill", "62 129", [(OTHER, 9), (0, 9), (0xFFFFFFFF, 9), (1, 0)], [(ME, 9)]),
    ("processes", "tgkill", "234 131", [(OTHER, OTHER, 9)], [(ME, ME, 9)]),
    ("processes", "rt_tgsigqueueinfo", "297 240", [(OTHER, OTHER, 9)], [(ME, ME, 9)]),
    ("processes", "prlimit64", "302 261", [(OTHER,), (ME,)], [(0,)]),
    ("processes", "prctl", "157 167", [(1,)], [(15,), (38,)]),
    ("processes", "ioctl", "16 29", [(3, 0x8901), (3, 0x8902)], [(3, 0x5401), (3, 0x5421)]),
]
REFUSAL, NO_SUCH_CALL, NOTHING = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x50000
ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def numbers(table: str, column: int) -> dict[str, int]:
    """The calls of a table on one architecture."""
    rows = [row.split() for row in table.split(", ")]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def action(program: list[bytes], architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The filter's action for a call, found by interpreting its instructions."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *padded)
    register, place = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack("HBBI", program[place])
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            place += if_true if holds else if_false


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each architecture that the filter supports, as if this machine had it."""
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    monkeypatch.setattr(os, "getpid", lambda: ME)
    name: str = request.param
    return name


@pytest.mark.parametrize("guard", REFUSED)
def test_a_guarantee_refuses_its_calls_and_no_others(machine: str, guard: str) -> None:
    column, architecture = list(MACHINES).index(machine), MACHINES[machine]
    program = seccomp._program({guard})
    decided = {number for one in DECIDED for number in [int(one[2].split()[column])]}
    expected = dict.fromkeys(numbers(REFUSED[guard], column).values(), REFUSAL)
    if guard == "files":
        expected |= dict.fromkeys(numbers(IGNORED, column).values(), NOTHING)
    if guard == "processes":
        expected[435] = NO_SUCH_CALL  # clone3
    for number in sorted(set(range(LAST + 1)) - decided):
        assert action(program, architecture, number) == expected.get(number, ALLOWED), number


@pytest.mark.parametrize("rule", DECIDED, ids=lambda rule: f"{rule[0]}-{rule[1]}")
def test_calls_decided_by_their_arguments(machine: str, rule: tuple[str, str, str, list[Any], list[Any]]) -> None:
    guard, _, table, refused, allowed = rule
    column, architecture = list(MACHINES).index(machine), MACHINES[machine]
    number = int(table.split()[column])
    program = seccomp._program(set(GUARANTEES))
    alone, without = seccomp._program({guard}), seccomp._program(set(GUARANTEES) - {guard})
    for arguments in refused:
        assert action(program, architecture, number, arguments) == REFUSAL
        assert action(alone, architecture, number, arguments) == REFUSAL
        assert action(without, architecture, number, arguments) == ALLOWED
    for arguments in allowed:
        assert action(program, architecture, number, arguments) == ALLOWED


def test_other_machines_and_newer_calls_are_refused(machine: str) -> None:
    program = seccomp._program(set(GUARANTEES))
    for architecture in MACHINES.values():
        other = architecture != MACHINES[machine]
        assert (action(program, architecture, 1) == KILLED) is other
    for number in (LAST + 1, 463, 1000, 0x40000000, 0x40000029):
        assert action(program, MACHINES[machine], number) == NO_SUCH_CALL
    assert action(program, MACHINES[machine], LAST) == ALLOWED


# The kernel itself refuses some of the calls with the same error, so the filter of this test returns another one.
TRIES = """
import ctypes, errno, json, sys
sys.path.insert(0, sys.argv[1])
from dora_rl.envs.sandbox.jail import kernel, seccomp
seccomp.DENIED = errno.EXFULL
call = ctypes.CDLL(None, use_errno=True).syscall
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(json.loads(sys.argv[2]))
found = {}
for number in json.loads(sys.argv[3]):
    ctypes.set_errno(0)
    call(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    found[number] = ctypes.get_errno()
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or Sandbox.guarantees() != GUARANTEES or platform.machine() not in MACHINES,
    reason="this system can't confine code",
)
@pytest.mark.parametrize("guard", REFUSED)
def test_the_kernel_refuses_each_call_by_the_filter(guard: str) -> None:
    column = list(MACHINES).index(platform.machine())
    tried = list(numbers(REFUSED[guard], column).values())
    source = str(Path(sandbox.__file__).parents[3])
    command = [sys.executable, "-I", "-c", TRIES, source, json.dumps([guard]), json.dumps(tried)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(map(str, tried), errno.EXFULL)


FILL = """
import os, socket
kept, accepted = [], 0
def fill(write):
    global accepted
    try:
        while True: accepted += write(bytes(1 << 16))
    except BlockingIOError: pass
try:
    while True:
        ends = make()
        kept += ends
        for end in writers(ends):
            fill(end)
except OSError as error:
    assert error.errno == 24, error
print(len(kept), accepted)
"""
PIPES = "def make(): return os.pipe2(os.O_NONBLOCK)\ndef writers(ends): return [lambda data: os.write(ends[1], data)]\n"
PAIRS = """
def make():
    ends = socket.socketpair()
    for end in ends: end.setblocking(False)
    return ends
def writers(ends): return [end.send for end in ends]
"""


UNHURRIED: dict[str, Any] = {"wall_seconds": 600.0, "cpu_seconds": 60.0}


def default_buffer() -> int:
    """Bytes that one end of a socket pair can hold on this system."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        return ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.mark.skipif(
    sys.platform != "linux" or Sandbox.guarantees() != GUARANTEES, reason="this system can't confine code"
)
@pytest.mark.parametrize(("kind", "each"), [(PIPES, 16 * 4096), (PAIRS, None)])
def test_what_pipes_and_pairs_hold_is_bounded_by_the_open_files(kind: str, each: int | None) -> None:
    """As docs/tasks.md says: a pipe holds 16 pages, each end of a pair what the system gives to any socket."""
    if each is None:
        each = default_buffer()
    else:
        each = 16 * os.sysconf("SC_PAGE_SIZE")
    outcome = Sandbox(SandboxLimits(open_files=64, **UNHURRIED)).run(kind + FILL)
    ends, accepted = map(int, outcome.stdout.split())
    assert 50 < ends <= 61
    # Two ends share the buffer of a pipe; a write that does not fit is taken up to one write beyond the limit.
    assert 0 < accepted <= (ends * each // 2 if kind is PIPES else ends * (each + (1 << 16)))


@pytest.mark.skipif(
    sys.platform != "linux" or Sandbox.guarantees() != GUARANTEES, reason="this system can't confine code"
)
@pytest.mark.parametrize(
    "code",
    [
        "import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
        "import socket\nsocket.socketpair()[0].setsockopt(1, 7, 1 << 20)",
        "import socket\nsocket.socketpair()[0].sendmsg([b'x'])",
        "import os\nr, w = os.pipe()\nos.splice(os.open('main.py', 0), w, 1)",
        "import socket\nsocket.socketpair(socket.AF_INET)",
    ],
)
def test_enlarging_them_is_refused(code: str) -> None:
    assert "PermissionError" in Sandbox(SandboxLimits(**UNHURRIED)).run(code).stderr
