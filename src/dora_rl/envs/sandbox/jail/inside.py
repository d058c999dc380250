"""The process in which the code runs: it locks itself in, says what holds, and becomes the code.

The plan comes as JSON in the last argument. The report is written before the code starts; a run without a report has
not run the code. If a guard that the plan requires can't be had, the code is not started.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

from dora_rl.envs.sandbox.jail import MAIN, kernel, landlock, seccomp


def main() -> None:
    """Lock this process in, then run the code in it."""
    plan = json.loads(sys.argv[-1])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != plan["parent"]:
        os._exit(1)  # it died before it could take this process along
    code = Path(MAIN).read_text(encoding="utf-8")
    with Path(plan["report"]).open("w") as report:
        missing = _lock_in(plan)
        json.dump(missing, report)
    if missing and plan["strict"]:
        os._exit(1)
    _become(code)


def _lock_in(plan: dict[str, Any]) -> dict[str, str]:
    """Set up every guard; those that can't be had, with the reason."""
    guards, missing = set(plan["guards"]), dict[str, str]()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    _limit(plan["limits"], guards)
    if "files" in guards:
        try:
            landlock.confine(plan["readable"], (str(Path.cwd()), "/dev/null"))
        except OSError as error:
            missing["files"] = f"the kernel has no Landlock ({error.strerror})"
    called = guards & seccomp.REFUSED.keys()
    if called:
        why = _filter(called)
        missing.update({guard: why for guard in called if why and guard not in missing})
    return missing


def _filter(guards: set[str]) -> str | None:
    """Why system calls can't be filtered, if so."""
    if not seccomp.supported():
        return "system calls can be filtered on x86_64 and aarch64 only"
    try:
        seccomp.install(guards)
    except OSError as error:
        return f"the kernel has no seccomp filters ({error.strerror})"
    return None


def _limit(limits: dict[str, int], guards: set[str]) -> None:
    chosen = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0}
    if "files" in guards:
        chosen |= {resource.RLIMIT_FSIZE: limits["written"], resource.RLIMIT_NOFILE: limits["open_files"]}
    if "memory" in guards:
        chosen[resource.RLIMIT_AS] = limits["memory"]
    for kind, value in chosen.items():
        _set(kind, value, value)
    if "time" in guards:
        # The first says by its signal what happened; code that ignores it meets the second.
        _set(resource.RLIMIT_CPU, limits["cpu"], limits["cpu"] + 1)


def _set(kind: int, soft: int, hard: int) -> None:
    """Limits are lowered only, whatever they are here already."""
    _, most = resource.getrlimit(kind)
    most = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (min(soft, most), most))


def _become(code: str) -> None:
    """Run the code as the main module, with tracebacks that begin at its own first line."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=MAIN)
    sys.modules["__main__"] = module
    sys.argv = [MAIN]
    sys.dont_write_bytecode = True
    sys.path[0] = str(Path.cwd())
    try:
        exec(compile(code, MAIN, "exec"), module.__dict__)  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        import traceback

        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        sys.exit(1)
