"""Several versions at work at once, in a real run: forced by an environment that waits for it, so no clock decides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dora_rl.core.commands import StartGroup
from dora_rl.core.events import Generated, Moved
from dora_rl.ledger.ledger import connect, read_events
from dora_rl.runtime.folder import RunFolder
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import lines, make_run, merged, settings

GROUP = 2
STEPS = 8  # so that there are groups left for the later versions
ENVIRONMENT = """
import json
import time

class Waits:
    '''Every other problem has no answer until version 2 is at work.'''

    def __init__(self, log):
        self.log = log

    def reset(self, problem):
        self.waits = int(problem.columns["answer"]) % 2 == 0

    def step(self, text):
        while self.waits and not self.begun(2):
            time.sleep(0.01)
        return None, 1.0, True

    def begun(self, version):
        with open(self.log) as log:
            whole = [line for line in log if line.endswith("\\n") and "StartGroup" in line]
        commands = [one for line in whole for one in json.loads(line)["commands"]]
        return any(one["command"] == "StartGroup" and one["version"] == version for one in commands)
"""


def live(folder: RunFolder) -> int:
    """The most versions that had running requests at once."""
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


def test_three_versions_are_live_and_make_room_for_each_other_by_moves_with_their_kv(
    host: Host, base: Path, tmp_path: Path
) -> None:
    (base / "waits.py").write_text(ENVIRONMENT)
    log = tmp_path / "live" / "events.jsonl"
    changes = {
        "out": str(tmp_path),
        "environment": {"kind": "waits.py:Waits", "max_turns": 1, "at_once": 16, "params": {"log": str(log)}},
        "reward": {"functions": []},
        "rollout": {"instances": 3, "engine": {"max_requests": 16}},
    }
    tree = merged(settings(base, steps=STEPS, max_staleness=3, groups_per_step=2, group_size=GROUP), changes)
    run = host.start(make_run(base, "live", tree))
    assert broken(run, run.wait(), STEPS) == []
    assert live(run.folder) >= 3
    with connect(run.folder.ledger) as connection:
        assert any(isinstance(logged.event, Moved) for logged in read_events(connection))
    assert sum(line.get("rollout/reprefilled_tokens", 0) for line in lines(run.folder.metrics)) == 0
