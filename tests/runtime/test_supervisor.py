"""The supervisor without processes: how a run ends, and which instances leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.process_manager import WorkerProcess
from dora_rl.runtime.supervisor.run_state import RunState
from dora_rl.runtime.supervisor.supervisor import Supervisor
from dora_rl.runtime.transport import messages as m

TREE = {
    "model": {"path": "m"},
    "data": {"source": "d"},
    "reward": {"functions": ["exact"], "workers": 1},
    "control": {"groups_per_step": 1, "group_size": 1, "max_response_tokens": 1},
}


class Line:
    """A channel that keeps what was sent."""

    closed = False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Stage:
    """A supervisor over processes that do nothing by themselves."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.starts = 0
        self.backend = SimpleNamespace(discard_kv=lambda _: None)
        self.notices: list[str] = []
        self.wanted_instances = 0
        does_nothing = dict.fromkeys(("apply", "check", "mark", "settle", "flush"), lambda *_, **__: None)
        nothing: Any = SimpleNamespace(**does_nothing, groups={}, stop_ids=(), decode=str, write_error="")
        processes: Any = self
        self.state = RunState(3)
        self.supervisor = Supervisor(
            build(RunConfig, TREE),
            state=self.state,
            trajectories=nothing,
            failures=nothing,
            ledger=nothing,
            store=nothing,
            processes=processes,
            metrics=nothing,
            tokenization=nothing,
            origin=0,
            notify=self.notices.append,
        )
        scaling: Any = SimpleNamespace(wanted=lambda: self.wanted_instances)
        self.scaling = scaling
        self.supervisor.start(scaling)
        self.trainer = self.supervisor.trainer.worker

    def start(self, role: str, worker_id: str, **_: Any) -> WorkerProcess:
        self.workers.append(WorkerProcess(role, worker_id, incarnation=1))
        return self.workers[-1]

    def cores(self, _node: str) -> int:
        return 1

    def unresponsive(self, *_: float) -> list[tuple[WorkerProcess, str]]:
        return []

    def lost(self, process: WorkerProcess, _reason: str, **_: bool) -> bool:
        process.channel = None
        return True

    def remove(self, process: WorkerProcess) -> None:
        self.workers.remove(process)

    def scale(self, wanted: int) -> set[str]:
        """The instances that there are then."""
        self.wanted_instances = wanted
        self.supervisor.rollout.scale(self.scaling)
        return {worker.worker_id for worker in self.supervisor.rollout.workers}

    def trainer_connects(self) -> Line:
        line: Any = Line()
        self.trainer.incarnation += 1
        self.trainer.last_message_at = None
        self.trainer.channel = line
        return line  # type: ignore[no-any-return]


def test_a_trainer_that_restarts_at_the_end_is_asked_to_save() -> None:
    stage = Stage()
    supervisor, trainer = stage.supervisor, stage.trainer
    stage.state.newest = 3
    assert not supervisor._finished()  # it has not connected, as on a cluster
    for reason in ("it was killed", "it was killed again"):
        line = stage.trainer_connects()
        assert not supervisor._finished()
        assert m.SaveCheckpoint() not in line.sent  # the time for loading is not the time for saving
        trainer.last_message_at = 0.0
        assert not supervisor._finished()
        assert not supervisor._finished()
        assert line.sent.count(m.SaveCheckpoint()) == 1
        supervisor.worker_lost(trainer, reason)
        assert not supervisor._finished()  # between two incarnations nothing can be asked
    line = stage.trainer_connects()
    trainer.last_message_at = 0.0
    assert not supervisor._finished()
    assert m.SaveCheckpoint() in line.sent
    supervisor.receive(trainer, m.SaveDone(version=2, path=""))
    assert not supervisor._finished()  # it went back to an older checkpoint, and is asked again
    assert line.sent.count(m.SaveCheckpoint()) == 2
    supervisor.receive(trainer, m.SaveDone(version=3, path=""))
    assert supervisor._finished()


def test_instances_that_were_given_up_leave_first() -> None:
    stage = Stage()
    assert stage.scale(4) == {"i0", "i1", "i2", "i3"}
    for number in (0, 2):
        stage.supervisor.rollout.workers[number].given_up = True
    assert stage.scale(3) == {"i1", "i2", "i3"}
    assert stage.scale(1) == {"i1"}
    assert [worker.worker_id for worker in stage.workers if worker.role == "instance"] == ["i1"]
    assert stage.scale(2) == {"i0", "i1"}  # started again
    assert not any(worker.given_up for worker in stage.supervisor.rollout.workers)


def test_irreversible_commands_wait_until_the_ledger_has_their_event() -> None:
    stage = Stage()
    supervisor = stage.supervisor
    done: list[c.Command] = []
    synced: list[str] = []
    ledger: Any = SimpleNamespace(
        log=lambda *_: 7, sync=lambda: synced.append("sync"), durable=6, failure="", write_error=""
    )
    supervisor._ledger = ledger
    supervisor._executors = dict.fromkeys(supervisor._executors, done.append)
    fetch, apply, retire = c.FetchPrompts(count=1), c.Apply(step=0, attempt=1, groups=(0,)), c.Retire(version=0)
    supervisor._deliver(e.Tick(), 0)
    supervisor.execute([apply, retire, fetch])
    assert done == [fetch], "a command that can be undone does not wait"
    assert synced == ["sync"], "the trainer waits, so the ledger is written at once"
    supervisor._release()
    assert done == [fetch]
    ledger.durable = 7
    supervisor._release()
    assert done == [fetch, apply, retire]


def test_every_command_has_an_executor() -> None:
    assert set(Stage().supervisor._executors) == set(get_args(c.AnyCommand))
