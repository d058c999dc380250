"""The world of a run without processes: how it ends, and who leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.process_manager import WorkerProcess
from dora_rl.runtime.supervisor.supervisor import Supervisor
from dora_rl.runtime.transport import messages as m

TREE = {
    "model": {"path": "m"},
    "data": {"source": "d"},
    "reward": {"functions": ["exact"], "workers": 1},
    "control": {"groups_per_step": 1, "group_size": 1, "max_response_tokens": 1},
}


class Line:
    """A channel that remembers what was said."""

    closed = False

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)


class Stage:
    """A world over processes that do nothing by themselves."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.backend = SimpleNamespace(discard_kv=lambda _: None)
        self.notices: list[str] = []
        self.wanted_instances = 0
        does_nothing = dict.fromkeys(("note", "settle", "flush"), lambda *_, **__: None)
        nothing: Any = SimpleNamespace(**does_nothing, groups={}, stop_ids=(), trouble="")
        processes: Any = self
        self.world = Supervisor(
            config=build(RunConfig, TREE),
            books=nothing,
            ledger=nothing,
            store=nothing,
            processes=processes,
            recorder=nothing,
            text=nothing,
            origin=0,
            notice=self.notices.append,
        )
        scaling: Any = SimpleNamespace(wanted=lambda: self.wanted_instances)
        self.world.begin(scaling)
        self.crew = self.world._parts.crew

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
        """The places that there are then."""
        self.wanted_instances = wanted
        self.world._scale()
        return {process.worker_id for process in self.crew.places}

    def trainer_connects(self) -> Line:
        line: Any = Line()
        self.crew.trainer.incarnation += 1
        self.crew.trainer.last_message_at = None
        self.crew.trainer.channel = line
        return line  # type: ignore[no-any-return]


def test_a_trainer_that_comes_back_at_the_end_is_asked_to_save() -> None:
    stage = Stage()
    world, trainer = stage.world, stage.crew.trainer
    world.go_on_from(3)
    assert not world._over()  # it has not connected, as on a cluster
    for reason in ("it was killed", "it was killed again"):
        line = stage.trainer_connects()
        assert not world._over()
        assert m.SaveCheckpoint() not in line.said  # loading takes its time, which is not that of saving
        trainer.last_message_at = 0.0
        assert not world._over()
        assert not world._over()
        assert line.said.count(m.SaveCheckpoint()) == 1
        world._lost(trainer, reason)
        assert not world._over()  # between two lives nobody can be asked
    line = stage.trainer_connects()
    trainer.last_message_at = 0.0
    assert not world._over()
    assert m.SaveCheckpoint() in line.said
    world._saved(3, "")
    assert world._over()


def test_instances_that_were_given_up_leave_first() -> None:
    stage = Stage()
    assert stage.scale(4) == {"i0", "i1", "i2", "i3"}
    for number in (0, 2):
        stage.crew.places[number].given_up = True
    assert stage.scale(3) == {"i1", "i2", "i3"}
    assert stage.scale(1) == {"i1"}
    assert [process.worker_id for process in stage.workers if process.role == "instance"] == ["i1"]
    assert stage.scale(2) == {"i0", "i1"}  # filled anew
    assert not any(process.given_up for process in stage.crew.places)


def test_what_can_not_be_undone_waits_until_the_ledger_has_it() -> None:
    stage = Stage()
    world, parts = stage.world, stage.world._parts
    done: list[c.Command] = []
    asked: list[str] = []
    ledger: Any = SimpleNamespace(
        log=lambda *_: 7, sync=lambda: asked.append("sync"), durable=6, failure="", trouble=""
    )
    parts.ledger = ledger
    parts.books.note = lambda *_: None  # type: ignore[method-assign]
    world._doing = SimpleNamespace(do=done.append)  # type: ignore[assignment]
    world._verdicts = SimpleNamespace(note=lambda *_: None)  # type: ignore[assignment]
    fetch, apply, retire = c.FetchPrompts(count=1), c.Apply(step=0, attempt=1, groups=(0,)), c.Retire(version=0)
    world._give(e.Tick(), 0)
    world.execute([apply, retire, fetch])
    assert done == [fetch], "what can be undone does not wait"
    assert asked == ["sync"], "the trainer waits, so the ledger is written at once"
    world._release()
    assert done == [fetch]
    ledger.durable = 7
    world._release()
    assert done == [fetch, apply, retire]
