"""Sessions without processes: reports of a former attempt change nothing, and each `Parked` has its `Unparked`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import SlotId
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.env_sessions import EnvSessions
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryEntry
from dora_rl.runtime.transport import messages as m

A, B, C = SlotId("a", 0), SlotId("b", 0), SlotId("c", 0)


class Stage:
    """One trajectory, what is asked of its environment, what instances are told, what happens."""

    def __init__(self) -> None:
        self.book = TrajectoryEntry()
        self.asked: list[Any] = []
        self.told: list[tuple[str, Any]] = []
        self.events: list[e.Event] = []
        group = SimpleNamespace(problem=Problem(key="0-", prompt=""), prompt=(1,), version=0)
        books: Any = SimpleNamespace(find=lambda _: self.book, trajectory=lambda _: self.book, group_of=lambda _: group)
        text: Any = SimpleNamespace(
            observation=lambda said: tuple(map(ord, said)), decode=str, stopped=lambda tokens: bool(len(tokens))
        )
        judges: Any = SimpleNamespace(
            ask=lambda question, answer, _timeout, _session: self.asked.append((question, answer)),
            drop=lambda _session: None,
        )
        ledger: Any = SimpleNamespace(append_tokens=lambda _rows, _ended: None)
        self.turns = EnvSessions(
            books,
            text,
            judges,
            ledger,
            lambda name: SimpleNamespace(send=lambda message: self.told.append((name, message))),  # type: ignore[return-value, arg-type]
            lambda _, slot: self.told.append((slot.instance, "submit")),
            self.events.append,
            100,
            100,
            1.0,
        )

    def speak(self) -> None:
        """The policy ends a turn, on A."""
        self.book.take(TokenChunk.of(0, [5, 6], [0.0, 0.0], version=0, start=len(self.book.response)))

    def answer(self, said: str = "x", *, done: bool = False) -> None:
        self.asked.pop(0)[1](m.EnvResult(item=0, observation=said, done=done))

    def begin(self) -> None:
        """It has had its opening, spoken, and is parked on A."""
        self.turns.start(0, A)
        self.answer()
        self.speak()
        self.turns.parked(e.Parked(trajectory=0, attempt=0, kv_tokens=1))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_what_was_not_heard_before_a_new_attempt_is_not_said_again_after_it() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()  # while it is being moved
    stage.turns.refused(0, 0, "a")
    stage.book.attempt = 1  # the move failed: it goes on from its tokens
    stage.turns.resume(0, 1, C)
    stage.speak()
    told = list(stage.told)
    stage.turns.moved(e.Moved(trajectories=(0,), attempts=(1,), source=C, target=B))
    assert stage.told == told


def test_a_late_arrival_of_a_former_attempt_changes_no_place() -> None:
    stage = Stage()
    stage.begin()
    stage.book.attempt = 1
    stage.turns.resume(0, 1, C)
    stage.turns.moved(e.Moved(trajectories=(0,), attempts=(0,), source=A, target=B))
    stage.answer()
    assert stage.told[-1] == ("c", "submit")


def test_a_former_attempt_neither_asks_its_environment_nor_is_told_again() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()
    stage.book.attempt = 1
    stage.turns.resume(0, 1, C)
    told, asked = list(stage.told), list(stage.asked)
    stage.turns.parked(e.Parked(trajectory=0, attempt=0, kv_tokens=1))
    stage.turns.refused(0, 0, "a")
    assert (stage.told, stage.asked) == (told, asked)


def test_every_park_ends_once_also_that_of_an_opening_which_lost_its_place() -> None:
    stage = Stage()
    stage.turns.start(0, A)
    stage.book.attempt = 1
    stage.turns.resume(0, 1, C)
    stage.answer()
    assert stage.kinds() == ["Parked", "Unparked"]
    stage.speak()
    stage.turns.parked(e.Parked(trajectory=0, attempt=1, kv_tokens=1))
    stage.answer(done=True)
    assert stage.kinds() == ["Parked", "Unparked"] * 2


def test_a_response_that_was_cut_off_is_not_told_when_the_session_is_played_again() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()
    stage.speak()
    stage.book.ended = "length"
    stage.turns.score(0, lambda _: None)
    question = stage.asked.pop(0)[0]
    assert question.finish
    assert len(question.texts) == 1
    stage.book.ended = "environment"
    stage.turns.score(0, lambda _: None)
    assert len(stage.asked.pop(0)[0].texts) == 2


def test_a_verdict_of_a_session_that_answers_otherwise_is_a_failed_one() -> None:
    stage = Stage()
    stage.begin()
    stage.answer("x")
    stage.speak()
    stage.book.ended = "environment"
    verdicts: list[m.ScoreResult] = []
    for replayed in (("x", "x"), ("x", "y")):
        stage.turns.score(0, verdicts.append)
        stage.asked.pop(0)[1](m.ScoreResult(item=0, reward=1.0, components={}, failed=None, replayed=replayed))
    assert [verdict.reward for verdict in verdicts] == [1.0, None]
