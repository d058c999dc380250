"""What the supervisor derives from the event log agrees with the orchestrator at every point of the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime.supervisor.run_state import RunState
from tests.schedules import run_schedule


def incarnated(message: Any) -> Any:
    """The same event or command with the instance named by worker and incarnation, as the supervisor names it."""
    match message:
        case e.InstanceJoined(spec=spec):
            return e.InstanceJoined(spec=msgspec.structs.replace(spec, instance=f"{spec.instance}.1"))
        case e.InstanceLost() | c.EvictInstance():
            return msgspec.structs.replace(message, instance=f"{message.instance}.1")
        case _:
            return message


@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_the_run_state_agrees_with_the_orchestrator(seed: int) -> None:
    chaos = run_schedule(seed)
    orchestrator, state = Orchestrator(chaos.config), RunState(chaos.config.staleness)
    scores: set[int] = set()
    for event, at, commands in chaos.log:
        assert orchestrator.step(event, at) == commands
        state.apply(incarnated(event), [incarnated(command) for command in commands], at)
        snapshot = orchestrator.snapshot()
        assert state.at == at
        assert (state.newest, state.bound) == (snapshot.newest, snapshot.max_staleness)
        lost = {one.instance for one in state.losses("") if isinstance(one, e.InstanceLost)}
        assert lost == {f"{slot.slot.instance}.1" for slot in snapshot.slots}
        if isinstance(event, e.Scored | e.TrajectoryFailed):
            scores.discard(event.trajectory)
        scores |= {command.trajectory for command in commands if isinstance(command, c.Score)}
        scores -= {command.trajectory for command in commands if isinstance(command, c.FailTrajectory)}
        assert {one.trajectory for one in state.open_commands() if isinstance(one, c.Score)} == scores
