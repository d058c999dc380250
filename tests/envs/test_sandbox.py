"""Hostile code is contained, and escapes when the guarantee that contains it is switched off."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora_rl.core.errors import SandboxError
from dora_rl.envs.sandbox import sandbox
from dora_rl.envs.sandbox.sandbox import GUARANTEES, Outcome, Sandbox, SandboxLimits, _library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or Sandbox.guarantees() != GUARANTEES, reason="this system can't confine code"
)

# Each snippet prints DONE if it succeeds. {place} is the test's folder with a file `secret` in it, {victim}
# a process and {port} a port that the test listens on.
CALL = "import ctypes\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
PROCESSES = {
    "fork": "import os\nif os.fork() == 0: os._exit(0)",
    "vfork": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])",
    "exec": "import os\nos.execv('/bin/echo', ['echo', 'DONE'])",
    "signal another": "import os\nos.kill({victim}, 9)",
    "signal its thread": CALL + "assert call(200, {victim}, 9) == 0",
    "signal its group's thread": CALL + "assert call(234, {victim}, {victim}, 9) == 0",
    "signal as a file's owner": """
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, {victim})
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')""",
    "slow another down": "import os\nos.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "limit another": "import resource\nresource.prlimit({victim}, 7, (3, 3))",
    "outlive the caller": "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0) == 0",
    "look into another": CALL
    + """
b = ctypes.create_string_buffer(8)
v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)
call(310, {victim}, v, 1, v, 1, ctypes.c_long(0))
assert ctypes.get_errno() == 14""",
}
MEMORY = {
    "allocate": "x = bytearray(600 << 20)",
    "map": "import mmap\nx = mmap.mmap(-1, 600 << 20)",
    "memory file": "import os\nos.memfd_create('x')",
    "memory of asynchronous files": CALL + "assert call(206, 99, ctypes.byref(ctypes.c_ulong(0))) == 0",
    "shared memory": CALL + "n = call(29, 0, 4096, 0o600)\nassert n >= 0\ncall(31, n, 0, 0)",
}
NETWORK = {
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)",
    "udp": "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "io_uring": CALL + "call(425, 1, ctypes.create_string_buffer(120))\nassert ctypes.get_errno() != 1",
}
FILES = {
    "read passwords": "open('/etc/passwd').read()",
    "read the parent's environment": "import os\nopen('/proc/%d/environ' % os.getppid()).read()",
    "read the project": "open({project!r}).read()",
    "read a secret": "open('{place}/secret').read()",
    "read through a link": "import os\nos.symlink('{place}/secret', 'x')\nopen('x').read()",
    "read through a hard link": "import os\nos.link('{place}/secret', 'x')\nopen('x').read()",
    "read beside its folder": "open('../stdin').read()",
    "list": "import os\nos.listdir('{place}')",
    "watch": CALL + "assert call(254, call(253), b'/', 256) > 0",
    "write": "open('{place}/secret', 'w').write('x')",
    "append": "open('{place}/secret', 'a').write('x')",
    "make": "open('{place}/new', 'x')",
    "make a folder": "import os\nos.mkdir('{place}/new')",
    "truncate": "import os\nos.truncate('{place}/secret', 0)",
    "remove": "import os\nos.remove('{place}/secret')",
    "rename": "import os\nos.rename('{place}/secret', '{place}/other')",
    "change the mode": "import os\nos.chmod('{place}/secret', 0)\nassert os.stat('{place}/secret').st_mode % 512 == 0",
    "change the time": "import os\nos.utime('{place}/secret', (1, 1))\nassert os.stat('{place}/secret').st_mtime == 1",
    "write a large file": "open('x', 'wb').write(bytes(33 << 20))",
    "open many files": "x = [open('x', 'w') for _ in range(100)]",
}
KINDS = {"processes": PROCESSES, "memory": MEMORY, "network": NETWORK, "files": FILES}
HOSTILE = {name: (guard, code) for guard, snippets in KINDS.items() for name, code in snippets.items()}
# Refused by two guarantees, or not allowed to root without capabilities anyway.
ALSO_FILES = {"vfork", "exec", "look into another"}
ALSO_ROOT = {"slow another down", "look into another", "read the parent's environment"}


class Targets:
    """What hostile code attacks: a file, a process and a port."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "secret").write_text("secret")
        (place / "secret").chmod(0o644)
        self.victim = subprocess.Popen(["/bin/sleep", "600"])
        self.listener = socket.create_server(("127.0.0.1", 0))

    def fill(self, code: str) -> str:
        port = self.listener.getsockname()[1]
        return code.format(place=self.place, victim=self.victim.pid, port=port, project=__file__)

    def untouched(self) -> bool:
        secret = self.place / "secret"
        same = secret.read_text() == "secret" and secret.stat().st_mode & 0o777 == 0o644
        return same and list(self.place.iterdir()) == [secret] and self.victim.poll() is None and not self.visited()

    def visited(self) -> bool:
        self.listener.setblocking(False)
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.listener.close()


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Targets]:
    made = Targets(tmp_path)
    yield made
    made.close()


def run(code: str, **limits: float) -> Outcome:
    return Sandbox(SandboxLimits.model_validate(limits)).run(code)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_fails_and_succeeds_without_its_guarantee(name: str, targets: Targets) -> None:
    guard, code = HOSTILE[name]
    if CALL in code and os.uname().machine != "x86_64":
        pytest.skip("the snippet has the numbers of x86_64")
    code = targets.fill(code) + "\nprint('DONE')"
    outcome = Sandbox().run(code)
    assert "DONE" not in outcome.stdout, outcome
    assert targets.untouched()
    if name in ALSO_ROOT and os.geteuid() == 0:
        return
    removed = {guard, "files"} if name in ALSO_FILES else {guard}
    # All bytes written are polled whatever the guarantees: this must not end the run by chance.
    roomy = SandboxLimits(disk_bytes=1 << 30)
    loose = Sandbox(roomy, strict=False, guards=GUARANTEES - removed).run(code)
    assert "DONE" in loose.stdout, loose


def test_a_fork_bomb_makes_no_process() -> None:
    outcome = run("import os\nwhile True:\n    try: os.fork()\n    except PermissionError: pass\n", wall_seconds=1)
    assert outcome.timed_out
    assert not children()


def test_a_daemon_does_not_survive_but_does_without_the_guarantee() -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n        time.sleep(600)\n    os._exit(0)\nos.wait()\ntime.sleep(0.2)\n"
    )
    outcome = Sandbox().run(code)
    assert "PermissionError" in outcome.stderr
    assert outcome.stdout == ""
    loose = Sandbox(strict=False, guards=GUARANTEES - {"processes"}).run(code)
    os.kill(int(loose.stdout), signal.SIGKILL)  # raises if the daemon is gone


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(600)", "input_ = open(0).read()\nwhile 1: 1"]
)
def test_code_that_does_not_end_is_ended(code: str) -> None:
    outcome = run(code, wall_seconds=0.5)
    assert outcome.timed_out
    assert outcome.reason == "ran longer than 0.5 s"
    assert outcome.exit_code == -signal.SIGKILL
    assert not children()


@pytest.mark.parametrize("before", ["", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"])
def test_code_that_only_computes_is_ended_by_its_cpu_time(before: str) -> None:
    outcome = run(before + "while True: pass", wall_seconds=600, cpu_seconds=1)
    assert outcome.timed_out
    assert outcome.reason == "used more CPU time than 1 s"


def test_without_the_guarantee_it_runs_on() -> None:
    limits = SandboxLimits(wall_seconds=2, cpu_seconds=1)
    outcome = Sandbox(limits, strict=False, guards=GUARANTEES - {"time"}).run("while True: pass")
    assert outcome.reason == "ran longer than 2 s"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_off(stream: str) -> None:
    flood = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    outcome = run(flood, output_bytes=100_000)
    assert outcome.reason == f"wrote more than 100000 bytes to {stream}"
    assert len(getattr(outcome, stream)) == 100_000
    assert run(f"import sys\nsys.{stream}.write('x' * 90_000)", output_bytes=100_000).ok


FILLING = {
    "many files": "for n in range(10**9): open(str(n), 'wb').write(bytes(1 << 16))",
    "many names": "import os\nfor n in range(10**9): os.symlink('x', str(n))",
    "a deep tree": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
}


@pytest.mark.parametrize("name", FILLING)
def test_filling_the_disk_is_cut_off_and_cleaned_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = run(FILLING[name])
    assert outcome.reason == "wrote more than 33554432 bytes or 1000 files"
    assert not list(tmp_path.iterdir())


def test_threads_can_be_started_and_are_limited() -> None:
    code = "import threading, time\nx = [threading.Thread(target=time.sleep, args=(nap,)) for _ in range(count)]\n"
    code += "for t in x: t.start()\nfor t in x: t.join()\nprint('DONE')"
    assert run("nap, count = 0, 8\n" + code).stdout == "DONE\n"
    assert run("nap, count = 600, 60\n" + code).reason == "started more than 32 threads"


def test_limits_cannot_be_lifted_from_inside() -> None:
    for kind in ("AS", "CPU", "FSIZE", "NOFILE"):
        outcome = run(f"import resource\nresource.setrlimit(resource.RLIMIT_{kind}, (1 << 40, 1 << 40))\n")
        assert "not allowed to raise" in outcome.stderr


def test_root_has_no_capabilities_inside() -> None:
    code = "import ctypes\nsets = (ctypes.c_uint32 * 6)()\nhead = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
    assert run(code + "assert ctypes.CDLL(None).capget(head, sets) == 0\nprint(*sets)").stdout == "0 0 0 0 0 0\n"


def test_system_calls_newer_than_the_table_are_refused() -> None:
    code = CALL + "for number in (451, 1000, 0x40000029):\n    assert call(number, 0, 0, 0) == -1\n"
    assert run(code + "    assert ctypes.get_errno() == 38\n").ok


def test_variables_and_open_files_of_the_parent_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    (tmp_path / "open").write_text("secret")
    with (tmp_path / "open").open() as held:
        os.set_inheritable(held.fileno(), True)
        code = "import os\nprint(sorted(os.environ))\nfor n in range(3, 64):\n    try: print(n, os.fstat(n))\n"
        outcome = run(code + "    except OSError: pass\n")
    assert outcome.stdout.splitlines() == [
        "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']"
    ]


def test_a_run_dies_with_its_caller_and_the_next_sandbox_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "from dora_rl.envs.sandbox.sandbox import *\nimport sys\n"
    program += "Sandbox(SandboxLimits(wall_seconds=600)).run(sys.argv[1])"
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    caller = subprocess.Popen([sys.executable, "-c", program, code], env={**os.environ, "TMPDIR": str(tmp_path)})
    message = eventually(lambda: next((f.read_text() for f in tmp_path.glob("*/stdout") if f.read_text()), ""))
    left = next(file.parent for file in tmp_path.glob("*/stdout"))
    Sandbox()
    assert left.exists()
    caller.kill()
    caller.wait()
    assert eventually(lambda: not Path(f"/proc/{int(message)}/stat").exists() or is_zombie(int(message)))
    os.utime(left, (1, 1))
    Sandbox()
    assert not left.exists()


def test_a_folder_in_use_is_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    from dora_rl.envs.sandbox.scratch import run_folder, sweep

    with run_folder() as folder:
        os.utime(folder, (1, 1))
        sweep()
        assert folder.exists()
    assert not folder.exists()


def test_ordinary_code_runs() -> None:
    code = """
import asyncio, collections, helper, json, math, numpy, random, re, shutil, sys, tempfile
async def double(n): return 2 * n
class A: pass
print(asyncio.run(double(4)), helper.three, int(numpy.arange(4).sum()), input(), sys.argv, __name__, A.__module__)
with tempfile.TemporaryDirectory() as folder:
    open(folder + '/a', 'w').write('copied')
    shutil.copy2(folder + '/a', folder + '/b')
    print(open(folder + '/b').read(), open('data/rows.txt').read())
"""
    outcome = Sandbox().run(code, stdin="line\n", files={"helper.py": "three = 3", "data/rows.txt": "rows"})
    assert outcome == Outcome(stdout="8 3 6 line ['main.py'] __main__ __main__\ncopied rows\n", stderr="", exit_code=0)


@pytest.mark.parametrize(
    ("code", "exit_code", "message"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, 'File "main.py", line 1, in <module>'),
        ("x = (", 1, "SyntaxError"),
        ("\0", 1, "null bytes"),
        ("def f(): f()\nf()", 1, "RecursionError"),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("import os\nos.abort()", -6, ""),
        ("print('\ud800')", 0, ""),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')", 0, ""),
    ],
)
def test_every_way_to_end_gives_an_outcome(code: str, exit_code: int, message: str) -> None:
    outcome = Sandbox().run(code)
    assert outcome.exit_code == exit_code
    assert message in outcome.stderr
    assert "jail" not in outcome.stderr
    assert outcome.reason is None


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "main.py", "", "a\0b"])
def test_files_stay_in_the_folder(name: str) -> None:
    with pytest.raises(SandboxError, match="can't be called"):
        Sandbox().run("", files={name: ""})


def test_fewer_guarantees_are_refused_unless_not_strict() -> None:
    with pytest.raises(SandboxError, match="network: it is switched off"):
        Sandbox(guards=GUARANTEES - {"network"})


@pytest.mark.parametrize(
    ("lacking", "missing"),
    [
        ("seccomp._MACHINES.clear()", ["files", "memory", "network", "processes"]),
        ("landlock._CREATE = 9999", ["files"]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_with_a_guarantee_missing_code_runs_only_if_not_strict(
    lacking: str, missing: list[str], strict: bool, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text("print('ran')")
    limits = {"written": 10**6, "open_files": 64, "memory": 1 << 30, "cpu": 10}
    plan = {"parent": os.getpid(), "report": str(tmp_path / "report"), "strict": strict, "limits": limits}
    plan |= {"guards": sorted(GUARANTEES), "readable": sorted(_library())}
    source = str(Path(sandbox.__file__).parents[3])
    program = (
        f"import sys; sys.path.insert(0, {source!r}); from dora_rl.envs.sandbox.jail import inside, landlock, seccomp; "
    )
    command = [sys.executable, "-I", "-c", program + lacking + "; inside.main()", json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert sorted(json.loads((tmp_path / "report").read_text())) == missing, done.stderr
    assert done.stdout == ("" if strict else "ran\n")


def children() -> list[int]:
    """Children of this process that still run."""
    try:
        return [os.waitpid(-1, os.WNOHANG)[0]]
    except ChildProcessError:
        return []


def eventually(check: Callable[[], object]) -> str:
    for _ in range(6000):
        found = check()
        if found:
            return str(found)
        time.sleep(0.05)
    raise AssertionError("it never came")


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
