"""Sessions without processes: reports of a former attempt change nothing, and each `Parked` has one `Unparked`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import SlotId
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.env_sessions import EnvSessions, SessionLimits
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryEntry
from dora_rl.runtime.transport import messages as m

A, B, C = SlotId("a", 0), SlotId("b", 0), SlotId("c", 0)


class Stage:
    """One trajectory, the requests to its environment, the messages to instances, and the events."""

    def __init__(self) -> None:
        self.entry = TrajectoryEntry()
        self.requests: list[Any] = []
        self.sent: list[tuple[str, Any]] = []
        self.events: list[e.Event] = []
        self.scores: list[Any] = []
        group = SimpleNamespace(problem=Problem(key="0-", prompt=""), prompt=(1,), version=0)
        trajectories: Any = SimpleNamespace(
            find=lambda _: self.entry, trajectory=lambda _: self.entry, group_of=lambda _: group
        )
        tokenization: Any = SimpleNamespace(
            observation=lambda text: tuple(map(ord, text)), decode=str, stopped=lambda tokens: bool(len(tokens))
        )
        pool: Any = SimpleNamespace(
            request=lambda request, on_reply, _timeout, _session: self.requests.append((request, on_reply)),
            close_session=lambda _session: None,
        )
        log: Any = SimpleNamespace(append_tokens=lambda _chunks, _ended: None)
        self.sessions = EnvSessions(
            trajectories,
            tokenization,
            pool,
            log,
            self,
            self.events.append,
            SessionLimits(100, 100, 1.0),
            lambda _, reply: self.scores.append(reply),
        )

    def resume(self, _trajectory: int, slot: SlotId) -> None:
        self.sent.append((slot.instance, "submit"))

    def send(self, instance: str, message: m.Message) -> bool:
        self.sent.append((instance, message))
        return True

    def take_turn(self) -> None:
        """The policy ends a turn."""
        self.entry.append(TokenChunk.of(0, [5, 6], [0.0, 0.0], version=0, start=self.entry.length))

    def answer(self, observation: str = "x", *, done: bool = False) -> None:
        """The environment answers the oldest request."""
        self.requests.pop(0)[1](m.EnvResult(item=0, observation=observation, done=done))

    def begin(self) -> None:
        """The trajectory gets its first observation, takes a turn, and is parked on A."""
        self.sessions.start(0, A)
        self.answer()
        self.take_turn()
        self.sessions.parked(e.Parked(trajectory=0, attempt=0, kv_tokens=1))

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_an_undelivered_message_is_not_sent_again_after_a_new_attempt() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()  # while the trajectory is being moved
    stage.sessions.not_parked(0, 0, "a")
    stage.entry.attempt = 1  # the move failed: it continues from its tokens
    stage.sessions.resume(0, 1, C)
    stage.take_turn()
    sent = list(stage.sent)
    stage.sessions.moved(e.Moved(trajectories=(0,), attempts=(1,), source=C, target=B))
    assert stage.sent == sent


def test_a_late_move_of_a_former_attempt_changes_no_slot() -> None:
    stage = Stage()
    stage.begin()
    stage.entry.attempt = 1
    stage.sessions.resume(0, 1, C)
    stage.sessions.moved(e.Moved(trajectories=(0,), attempts=(0,), source=A, target=B))
    stage.answer()
    assert stage.sent[-1] == ("c", "submit")


def test_reports_of_a_former_attempt_send_no_request_and_no_message() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()
    stage.entry.attempt = 1
    stage.sessions.resume(0, 1, C)
    sent, requests = list(stage.sent), list(stage.requests)
    stage.sessions.parked(e.Parked(trajectory=0, attempt=0, kv_tokens=1))
    stage.sessions.not_parked(0, 0, "a")
    assert (stage.sent, stage.requests) == (sent, requests)


def test_every_park_ends_once_also_if_the_slot_is_lost_before_the_first_observation() -> None:
    stage = Stage()
    stage.sessions.start(0, A)
    stage.entry.attempt = 1
    stage.sessions.resume(0, 1, C)
    stage.answer()
    assert stage.kinds() == ["Parked", "Unparked"]
    stage.take_turn()
    stage.sessions.parked(e.Parked(trajectory=0, attempt=1, kv_tokens=1))
    stage.answer(done=True)
    assert stage.kinds() == ["Parked", "Unparked"] * 2


def test_a_turn_that_was_cut_off_is_not_sent_when_the_session_is_finished() -> None:
    stage = Stage()
    stage.begin()
    stage.answer()
    stage.take_turn()
    stage.entry.ended = "length"
    stage.sessions.score(0)
    request = stage.requests.pop(0)[0]
    assert request.finish
    assert len(request.texts) == 1
    stage.entry.ended = "environment"
    stage.sessions.score(0)
    assert len(stage.requests.pop(0)[0].texts) == 2


def test_a_replayed_session_with_other_observations_fails_the_trajectory() -> None:
    stage = Stage()
    stage.begin()
    stage.answer("x")
    stage.take_turn()
    stage.entry.ended = "environment"
    for replayed in (("x", "x"), ("x", "y")):
        stage.sessions.score(0)
        stage.requests.pop(0)[1](m.ScoreResult(item=0, reward=1.0, components={}, failed=None, replayed=replayed))
    assert [score.reward for score in stage.scores] == [1.0, None]
