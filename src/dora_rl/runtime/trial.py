"""A trial call of a run's user code before the run starts, in a separate process.

Rewards are called with the first problem and a plausible completion; an environment is reset to the first problem.
Whatever goes wrong there (an exception, an exit, a hang, a wrong result) is reported in one sentence. The process is
below a reaper, so it and everything that it has started end with the trial.

The child writes a line of JSON for each stage that it begins, so that the parent knows which stage hung or died.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.core.errors import ConfigError, UserError
from dora_rl.envs.config import EnvironmentConfig, RewardConfig
from dora_rl.envs.data import Problem
from dora_rl.runtime.launch.fork_server import worker_environment
from dora_rl.runtime.launch.reaper import KILL_SECONDS, SIGNAL_BASE, run_with_reaper

_IMPORT_SECONDS = 300.0
"""Time for importing the user's code. A run has no such limit; the trial has one so that it can report a hanging
import."""
_COMPLETION = "The answer is 42."
"""Passed to reward functions if the problem has no answer, or if they fail on the answer."""
_REMEDY = "fix it, or skip this trial call with --no-trial"
_STAGES = {
    "import": "importing the code of the reward or environment",
    "reward": "the reward",
    "reset": "the environment",
}


class Trial:
    """A trial call in progress."""

    def __init__(self, reward: RewardConfig, environment: EnvironmentConfig, folder: Path, problem: Problem) -> None:
        self._seconds = {
            "import": _IMPORT_SECONDS,
            "reward": reward.timeout_seconds,
            "reset": environment.timeout_seconds,
        }
        asked = {
            "reward": reward.model_dump(mode="json"),
            "environment": environment.model_dump(mode="json"),
            "folder": str(folder),
            "problem": msgspec.to_builtins(problem),
        }
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._replies, replies = os.pipe()
        with tempfile.TemporaryFile() as question:
            question.write(json.dumps(asked).encode())
            question.seek(0)
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "dora_rl.runtime.trial", str(replies), str(os.getpid())],
                stdin=question,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[replies],
                env=os.environ | worker_environment(os.environ),
                start_new_session=True,
            )
        os.close(replies)

    def finish(self) -> None:
        """Wait for the result; raises a `ConfigError` that says in one sentence what went wrong."""
        try:
            last = self._follow()
            stage, failed = last["stage"], last.get("failed")
            if failed is not None:
                raise ConfigError(failed if stage == "import" else f"{self._call(stage)} failed: {failed}; {_REMEDY}")
            if stage != "done":
                raise ConfigError(f"{self._call(stage)} ended its process ({self._end()}); {_REMEDY}")
        finally:
            self.stop()

    def stop(self) -> None:
        """End the process and everything that it has started, whatever they do."""
        if self._output.closed:
            return
        self._process.terminate()  # the reaper kills everything below it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * KILL_SECONDS)
        self._process.kill()
        self._process.wait()
        os.close(self._replies)
        self._output.close()

    def _follow(self) -> dict[str, Any]:
        """Wait until the child has ended; returns the last stage that it reported."""
        last: dict[str, Any] = {"stage": "import"}
        partial = ""
        end = time.monotonic() + self._seconds["import"]
        while True:
            if not select.select([self._replies], [], [], max(0.0, end - time.monotonic()))[0]:
                stage = last["stage"]
                raise ConfigError(f"{self._call(stage)} took longer than {self._seconds[stage]:g} s; {_REMEDY}")
            read = os.read(self._replies, 1 << 16)
            if not read:
                self._process.wait()
                return last
            *lines, partial = (partial + read.decode()).split("\n")
            for line in lines:
                last = json.loads(line)
                if last["stage"] == "done" or "failed" in last:
                    return last
                end = time.monotonic() + self._seconds[last["stage"]]

    def _call(self, stage: str) -> str:
        return _STAGES[stage] if stage == "import" else f"a trial call of {_STAGES[stage]} on the first problem"

    def _end(self) -> str:
        """How the process ended, with the last line that it printed."""
        code = self._process.returncode
        number = -code if code < 0 else code - SIGNAL_BASE
        how = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {code}"
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {printed[-1][:200]}" if printed else how


def _serve(replies: int, asked: dict[str, Any]) -> None:
    """The side of the child process."""
    from dora_rl.envs.environment import Environments
    from dora_rl.envs.rewards import RewardScorer

    def report(stage: str, failed: str | None = None) -> None:
        line = {"stage": stage} if failed is None else {"stage": stage, "failed": failed}
        os.write(replies, json.dumps(line).encode() + b"\n")
        if failed is not None:
            os._exit(0)

    reward, environment = RewardConfig(**asked["reward"]), EnvironmentConfig(**asked["environment"])
    folder, problem = Path(asked["folder"]), msgspec.convert(asked["problem"], Problem)
    try:
        scorer = RewardScorer(reward, folder)
        environments = None if environment.kind is None else Environments(environment, folder, None)
    except UserError as error:
        report("import", str(error))
        return
    if environments is not None:
        report("reset")
        session = environments.begin(problem)
        session.close()
        if session.failed is not None:
            report("reset", session.failed)
    if reward.functions:
        failures = []
        for completion in {problem.answer or _COMPLETION: None, _COMPLETION: None}:
            report("reward")
            failures.append(scorer.score(problem, completion).failed)
            if failures[-1] is None:
                break
        if failures[-1] is not None:
            report("reward", failures[0])
    report("done")
    os._exit(0)  # even if the user's code has left threads running


if __name__ == "__main__":
    run_with_reaper(int(sys.argv[2]), lambda: _serve(int(sys.argv[1]), json.load(sys.stdin)))
