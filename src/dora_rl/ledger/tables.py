"""The tables as a projection of the event log: each event, with its commands, becomes a few plain SQL statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.interfaces import Projection
from dora_rl.core.types import Nanoseconds

Statement: TypeAlias = tuple[str, tuple[Any, ...]]

GENERATED = """
UPDATE trajectories SET instance = ?, version = ?, fingerprint = ?, tokens = ?
WHERE id = ? AND attempt = ? AND tokens IS NULL AND failed IS NULL
"""
_MOVE_ENDED = """
UPDATE moves SET ended_at = ?, arrived = ? WHERE trajectory = ? AND attempt = ? AND target = ? AND ended_at IS NULL
"""
_PROMPT = "INSERT INTO prompts (key, number, tokens) SELECT ?, coalesce(max(number) + 1, 0), ? FROM prompts"
_GROUP = "INSERT INTO groups (id, prompt, version, admitted_at) VALUES (?, ?, ?, ?)"
_TRAJECTORY = 'INSERT INTO trajectories (id, "group", instance) VALUES (?, ?, ?)'
SCORED = "UPDATE trajectories SET reward = ? WHERE id = ? AND reward IS NULL AND failed IS NULL"
_RESUMED = "UPDATE trajectories SET attempt = ?, instance = ? WHERE id = ?"
_FAILED = "UPDATE trajectories SET failed = ? WHERE id = ?"
BARRIERS = (_RESUMED, _FAILED)
"""Updates that decide which reports of trajectories count: `GENERATED` and `SCORED` must not be moved past them."""
INSERTS = (_PROMPT, _GROUP, _TRAJECTORY)
"""Inserts of rows that other rows refer to: a row comes after the rows that it refers to."""


class TableProjection(Projection):
    """Collects the statements that bring the tables up to date."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._statements: list[Statement] = []

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:
        self._statements += _event_statements(event, at)
        for command in commands:
            self._statements += _command_statements(command, at, self._group_size)

    def take(self) -> list[Statement]:
        """The statements since the last call, in the order in which they are to be executed."""
        statements, self._statements = self._statements, []
        return statements


def _event_statements(event: e.Event, at: Nanoseconds) -> Iterator[Statement]:
    match event:
        case e.PromptsArrived(prompts=prompts):
            for prompt in prompts:
                yield (_PROMPT, (prompt.key, prompt.tokens))
        case e.Generated():
            # A late report of an earlier attempt changes nothing: the statement names the attempt.
            yield (
                GENERATED,
                (event.instance, event.version, event.fingerprint, event.tokens, event.trajectory, event.attempt),
            )
        case e.Scored():
            yield (SCORED, (event.reward, event.trajectory))
        case e.Moved() | e.MoveFailed():
            for trajectory, attempt in zip(event.trajectories, event.attempts, strict=True):
                yield (
                    _MOVE_ENDED,
                    (at, isinstance(event, e.Moved), trajectory, attempt, str(event.target)),
                )
        case e.Published():
            yield (
                "UPDATE steps SET published_at = ?, fingerprint = ? WHERE step = ? AND published_at IS NULL",
                (at, event.fingerprint, event.version - 1),
            )
        case _:
            pass


def _command_statements(command: c.Command, at: Nanoseconds, group_size: int) -> Iterator[Statement]:
    match command:
        case c.StartGroup():
            yield (_GROUP, (command.group, command.prompt.key, command.version, at))
            for sibling in range(group_size):
                yield (_TRAJECTORY, (command.group * group_size + sibling, command.group, command.slot.instance))
        case c.Resume():
            yield (_RESUMED, (command.attempt, command.slot.instance, command.trajectory))
        case c.Move():
            for trajectory, attempt in zip(command.trajectories, command.attempts, strict=True):
                yield (
                    "INSERT INTO moves (trajectory, attempt, source, target, begun_at) VALUES (?, ?, ?, ?, ?)",
                    (trajectory, attempt, str(command.source), str(command.target), at),
                )
        case c.FailTrajectory():
            yield (_FAILED, (command.reason, command.trajectory))
        case c.GroupFailed():
            yield ("UPDATE groups SET failure = ? WHERE id = ?", ("; ".join(command.reasons), command.group))
        case c.GroupWithoutSignal():
            yield ("UPDATE groups SET no_signal = ? WHERE id = ?", (command.reward, command.group))
        case c.Apply():
            # A step that is trained again after a crash keeps its number and its groups.
            yield ("INSERT OR IGNORE INTO steps (step, applied_at) VALUES (?, ?)", (command.step, at))
            for group in command.groups:
                yield ("UPDATE groups SET step = ? WHERE id = ? AND step IS NULL", (command.step, group))
        case _:
            pass
