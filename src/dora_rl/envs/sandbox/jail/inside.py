"""The process in which the code runs: it confines itself, reports which guarantees hold, and runs the code.

The plan is JSON in the last argument. The report is written before the code starts: without a report, the code has not
run. If the system can't give a guarantee that the plan requires, the code is not started.
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
    """Confine this process, then run the code in it."""
    plan = json.loads(sys.argv[-1])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != plan["parent"]:
        os._exit(1)  # the parent died before its death signal was set up
    code = Path(MAIN).read_text(encoding="utf-8")
    with Path(plan["report"]).open("w") as report:
        missing = _confine(plan)
        json.dump(missing, report)
    if missing and plan["strict"]:
        os._exit(1)
    _run(code)


def _confine(plan: dict[str, Any]) -> dict[str, str]:
    """Set up every guarantee; returns those that the system can't give, with the reason."""
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
    """Filter system calls; returns the reason if that is not possible."""
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
        # The signal of the first limit shows what happened; the second kills code that ignores that signal.
        _set(resource.RLIMIT_CPU, limits["cpu"], limits["cpu"] + 1)


def _set(kind: int, soft: int, hard: int) -> None:
    """Lower a limit; limits that are already lower stay."""
    _, most = resource.getrlimit(kind)
    most = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (min(soft, most), most))


def _run(code: str) -> None:
    """Run the code as the main module, with tracebacks that start at its first line."""
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
