"""What the supervisor does and reports when a failure is permanent, or the run makes no progress."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from dora_rl.apps.audit import audited
from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.backend import LocalBackend
from dora_rl.runtime.launch.fork_server import ForkServer
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, leftovers, wait_for, wait_for_events
from tests.runtime.host import Host, Supervisor
from tests.runtime.making import PATIENCE, make_run, merged, settings


class NoForkServer(ForkServer):
    """A fork server that starts no process."""

    def __init__(self) -> None: ...

    def close(self) -> None: ...


def begin(host: Host, base: Path, name: str, other: dict[str, Any]) -> Supervisor:
    return host.start(make_run(base, name, merged(settings(base, steps=4), other)))


def test_watchdog_reports_what_the_run_waits_for(host: Host, base: Path) -> None:
    reward = {"functions": ["task.py:waits_to_be_released"]}
    run = begin(host, base, "stall", {"reward": reward, "control": {"deadlines": {"stall": 0.5}}})
    assert wait_for(run, lambda: run.noticed("the run makes no progress: "))
    (base / "released").touch()
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    stalled = [notice for notice in outcome["notices"] if notice.startswith("the run makes no progress: ")]
    assert stalled
    assert "waits for" in stalled[0]


def test_run_continues_with_fewer_instances_and_reports_it(host: Host, base: Path) -> None:
    run = begin(host, base, "smaller", {"supervision": {"restarts": 0}, "control": {"steps": 6}})
    assert wait_for_events(run, 12)
    assert run.signal(signal.SIGKILL, "i1")
    outcome = run.wait()
    assert broken(run, outcome, 6) == []
    assert any("i1" in notice and "given up" in notice for notice in outcome["notices"])
    assert any("continues with 1 instance" in notice for notice in outcome["notices"])


@pytest.mark.parametrize("place", ["i0", "trainer"])
def test_losing_the_last_process_of_a_role_ends_the_run_with_advice(host: Host, base: Path, place: str) -> None:
    other = {"supervision": {"restarts": 0}, "rollout": {"instances": 1}, "control": {"steps": 8}}
    run = begin(host, base, f"none-left-{place}", other)
    assert wait_for_events(run, 12)
    assert run.signal(signal.SIGKILL, place)
    outcome = run.wait()
    assert outcome["code"] == 1
    assert f"{place}.log" in outcome["error"]
    assert "resume the run" in outcome["error"]
    assert leftovers(run, outcome) == []
    again = host.start(run.folder)
    assert broken(again, again.wait(), 8) == []


def test_a_step_that_is_not_finite_ends_the_run_at_once(host: Host, base: Path) -> None:
    other = {"reward": {"functions": ["task.py:huge"]}, "trainer": {"algorithm": {"name": "rloo"}}}
    run = begin(host, base, "not-finite", other)
    for _ in range(2):  # also after a resume: the same groups give the same step
        outcome = run.wait()
        assert outcome["code"] == 1
        assert re.match(r"step 0: the \w+ is not finite; trajectories at fault: ", outcome["error"])
        assert "checkpoint before it is kept" in outcome["error"]
        assert not any("is lost" in notice for notice in outcome["notices"]), "a restart does not help"
        assert leftovers(run, outcome) == []
        assert audited(run.folder).problems == []
        run = host.start(run.folder)
    run.wait()


def test_a_policy_that_has_overflowed_ends_the_run(host: Host, base: Path) -> None:
    other = {"trainer": {"optimiser": {"learning_rate": 1e30}}, "control": {"steps": 200}}
    run = begin(host, base, "overflowed", other)
    outcome = run.wait()
    assert outcome["code"] == 1
    assert re.match(r"step \d+(: the \w+ is not finite| finds nothing to train: )", outcome["error"])
    assert "trajectories" in outcome["error"]
    assert leftovers(run, outcome) == []
    assert audited(run.folder).problems == []


def test_repeated_failures_with_one_cause_count_however_long_the_process_lived(tmp_path: Path) -> None:
    tree = merged(settings(tmp_path), {"supervision": {"restarts": 2}})
    folder = RunDir(tmp_path)
    processes = ProcessManager(folder, build(RunConfig, tree), LocalBackend(folder, NoForkServer()), 0, {})

    def restarted(cause: str) -> list[bool]:
        """Whether the process is restarted after each of five failures."""
        process = WorkerProcess("trainer", "trainer")
        again = []
        for _ in range(5):
            process.reported_failure = cause
            again.append(processes.lost(process, cause or "its process ended"))  # it started long ago
        return again

    assert restarted("NonFiniteError: step 3") == [True, True, False, False, False]
    assert restarted("") == [True] * 5
    processes.stop(patience=0.0)


def test_command_line(host: Host, base: Path, tmp_path: Path) -> None:
    """A run of the real command is interrupted, resumed and audited."""
    tree = merged(settings(base, steps=6), {"out": str(tmp_path)})
    config = base / "cli.toml"
    config.write_text(tomli_w.dumps(tree))

    def command(*arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "dora_rl.apps.cli", *map(str, arguments)]

    started = subprocess.Popen(command("train", config, "--name", "cli"), stdout=subprocess.PIPE, text=True)
    run = Supervisor(started.pid, RunDir(tmp_path / "cli"))
    assert wait_for_events(run, 15)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode == 130
    assert "--resume" in output
    resumed = host.start(run.folder)
    assert broken(resumed, resumed.wait(), 6) == []
    audited = subprocess.run(command("audit", run.folder.path), capture_output=True, text=True, timeout=PATIENCE)
    assert audited.returncode == 0
    assert "kept: all promises" in audited.stdout
