"""Several policy versions generate at once in a real run: an environment waits for it, so timing does not matter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dora_rl.core.commands import StartGroup
from dora_rl.core.events import Generated, Moved, Parked, TrajectoryFailed
from dora_rl.ledger.ledger import connect, read_events
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import PATIENCE, lines, make_run, merged, settings

GROUP = 2
BATCH = 2
STEPS = 8  # enough that groups remain for the later versions
ENVIRONMENT = """
import json
import time

class Waits:
    '''Answers no faster than new versions start, and holds some groups until three versions have started.

    No group generates before version 0 has groups on all instances, since one or two instances have no room for all
    that the staleness bound allows. Just-in-time admission may give an instance that joins late nothing, so the run
    admits eagerly.
    Then the first group of a version on each of two instances is held until three versions have started. Of the other
    groups, one step's worth is answered for each version that has started. So no version is skipped, versions 0 and 1
    occupy all instances, and one of the first three versions gets its slot by a move, in any order of the instances.
    '''

    def __init__(self, log, instances, batch):
        self.log = log
        self.instances = instances
        self.batch = batch

    def reset(self, problem):
        self.prompt = problem.key
        self.answered = False
        while len({one["slot"][0] for one in self.started()}) < self.instances:
            time.sleep(0.01)

    def step(self, text):
        if self.answered:
            return None, 1.0, True
        while self.waits():
            time.sleep(0.01)
        self.answered = True
        return "1+", 0.0, False

    def started(self):
        with open(self.log) as log:
            logged = [json.loads(line) for line in log if line.endswith("\\n")]
        return [one for line in logged for one in line["commands"] if one["command"] == "StartGroup"]

    def waits(self):
        begun, held, free = set(), {}, []
        for one in self.started():
            key, version, instance = one["prompt"]["key"].split("@")[0], one["version"], one["slot"][0]
            begun.add(version)
            of_version = held.setdefault(version, {})
            if instance not in of_version and len(of_version) < 2:
                of_version[instance] = key
            else:
                free.append(key)
        if len(begun) >= 3:
            return False
        # A group that is not in the log yet waits: the log is written every half second.
        return self.prompt not in free[: self.batch * len(begun)]
"""


def live(folder: RunDir) -> int:
    """The largest number of versions that had running requests at once."""
    running: Counter[int] = Counter()
    version: dict[int, int] = {}
    most = 0
    with connect(folder.ledger) as connection:
        for logged in read_events(connection):
            if isinstance(logged.event, Generated):
                running[version[logged.event.trajectory // GROUP]] -= 1
            for one in logged.commands:
                if isinstance(one, StartGroup):
                    version[one.group] = one.version
                    running[one.version] += GROUP
            most = max(most, sum(count > 0 for count in running.values()))
    return most


def test_three_versions_are_live_and_make_room_by_moving_parked_trajectories(
    host: Host, base: Path, tmp_path: Path
) -> None:
    (base / "waits.py").write_text(ENVIRONMENT)
    log = tmp_path / "live" / "events.jsonl"
    changes = {
        "out": str(tmp_path),
        "environment": {
            "kind": "waits.py:Waits",
            "max_turns": 2,
            "concurrency": 32,
            "timeout_seconds": PATIENCE,
            "params": {"log": str(log), "instances": 3, "batch": BATCH},
        },
        "reward": {"functions": []},
        "rollout": {"instances": 3, "engine": {"max_requests": 3 * GROUP}},
    }
    control: dict[str, Any] = {
        "max_staleness": 3,
        "groups_per_step": BATCH,
        "group_size": GROUP,
        "admission": "eager",
    }
    tree = merged(settings(base, steps=STEPS, max_response_tokens=70, **control), changes)
    run = host.start(make_run(base, "live", tree))
    assert broken(run, run.wait(), STEPS) == []
    assert live(run.folder) >= 3
    with connect(run.folder.ledger) as connection:
        events = [logged.event for logged in read_events(connection)]
    assert not any(isinstance(event, TrajectoryFailed) for event in events)
    moved: set[int] = set()
    next_turns: set[int] = set()
    for event in events:
        if isinstance(event, Moved):
            moved |= set(event.trajectories)
        elif isinstance(event, Parked) and event.trajectory in moved:
            next_turns.add(event.trajectory)
    assert next_turns, (
        "no trajectory that was moved while it waited for its environment took its next turn on the target"
    )
    assert sum(line.get("rollout/reprefilled_tokens", 0) for line in lines(run.folder.metrics)) == 0
