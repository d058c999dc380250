"""Multi-turn trajectories: the policy takes a turn, parks with its KV, and continues after the environment's turn.

    Parked --text--> reward worker --observation--> trajectory store --tokens--> the instance that has it --> Unparked
                          `--done--> EndRequest --> Generated --> Score --> final reward of the session

Invariants:
- an observation is stored before anything acts on it, so the trajectory has it wherever it continues;
- a trajectory that waits for its environment is not decoded, also if its instance is lost meanwhile;
- a session that is lost with its worker is replayed from the turns so far; if its observations differ from the recorded
  ones, the trajectory fails;
- reports of a former attempt are ignored: the trajectory is somewhere else by then;
- the orchestrator receives one `Unparked` for each `Parked`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Attempt, GroupId, InstanceId, SlotId, TrajectoryId
from dora_rl.runtime.supervisor.reward_client import RewardPool, RewardReply
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry, TrajectoryEntry
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.runtime.transport import messages as m

_DIVERGED = "its environment was lost, and gave other observations when it was replayed"


class Trajectories(Protocol):
    """The trajectories that have sessions."""

    @property
    def groups(self) -> Mapping[GroupId, GroupEntry]: ...

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None: ...

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry: ...

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry: ...


class TokenLog(Protocol):
    """Where observations are recorded: the ledger."""

    def append_tokens(self, chunks: Sequence[TokenChunk], ended: Sequence[tuple[TrajectoryId, str]]) -> None: ...


class Instances(Protocol):
    """Where the trajectories generate."""

    def resume(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Submit a trajectory to a slot with its tokens so far."""
        ...

    def send(self, instance: InstanceId, message: m.Message) -> bool:
        """Send to an instance; False if it is gone."""
        ...


class SessionLimits(NamedTuple):
    """How long a trajectory and an answer of its environment may be."""

    response_tokens: int
    context: int
    """Tokens of prompt and response together."""
    timeout: float
    """Seconds for each call of the environment."""


class EnvSessions:
    """The sessions of a run's trajectories, or of an evaluation's."""

    commands: ClassVar[tuple[type[c.Command], ...]] = (c.StartGroup, c.Resume, c.Score, c.FailTrajectory)
    """With an environment, these commands start here."""

    def __init__(
        self,
        trajectories: Trajectories,
        tokenization: Tokenization,
        pool: RewardPool,
        log: TokenLog,
        instances: Instances,
        emit: Callable[[e.Event], None],
        limits: SessionLimits,
        on_score: Callable[[TrajectoryId, RewardReply], None],
        first_session: int = 0,
    ) -> None:
        """A session is numbered like its trajectory, counted from `first_session`."""
        self._trajectories = trajectories
        self._tokenization = tokenization
        self._pool = pool
        self._log = log
        self._instances = instances
        self._emit = emit
        self._limits = limits
        self._on_score = on_score
        self._first_session = first_session
        self._slots: dict[TrajectoryId, SlotId] = {}
        """Where each trajectory is, or will continue."""
        self._waiting: dict[TrajectoryId, bool] = {}
        """Trajectories that wait for their environment, and whether their KV is parked in their slot."""
        self._reported: set[TrajectoryId] = set()
        """Trajectories that the orchestrator knows to be parked."""
        self._undelivered: set[TrajectoryId] = set()
        """Trajectories that were being moved when they should have continued."""
        self._texts: dict[TrajectoryId, list[str]] = {}
        """The policy's turns that the environment has answered."""

    def execute(self, command: c.Command) -> None:
        match command:
            case c.StartGroup(group=group, slot=slot):
                for trajectory in self._trajectories.groups[group].trajectories:
                    self.start(trajectory, slot)
            case c.Resume(trajectory=trajectory, attempt=attempt, slot=slot):
                if self._trajectories.trajectory(trajectory).ended is None:
                    self.resume(trajectory, attempt, slot)
                else:
                    self._instances.resume(trajectory, slot)
            case c.Score(trajectory=trajectory):
                self.score(trajectory)
            case c.FailTrajectory(trajectory=trajectory):
                self.fail(trajectory)
            case _:
                raise AssertionError(f"not a command for sessions: {command}")

    # -- from start to end ------------------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Reset the environment, then submit the trajectory."""
        self._slots[trajectory] = slot
        self._step(trajectory, parked=False)

    def resume(self, trajectory: TrajectoryId, attempt: Attempt, slot: SlotId) -> None:
        """The trajectory lost its slot; in the new one it continues when its environment has answered."""
        self._slots[trajectory] = slot
        self._undelivered.discard(trajectory)
        self._reported.discard(trajectory)
        entry = self._trajectories.trajectory(trajectory)
        if trajectory in self._waiting:
            self._waiting[trajectory] = False
        elif not entry.length or self._tokenization.stopped(entry.last_turn(sampled=True)):
            self._step(trajectory, parked=False)
        else:
            self._instances.resume(trajectory, slot)
            return
        self._reported.add(trajectory)
        self._emit(e.Parked(trajectory=trajectory, attempt=attempt, kv_tokens=None))

    def moved(self, event: e.Moved) -> None:
        """Trajectories have another slot now; messages that missed them on the way are sent again."""
        for trajectory, attempt in zip(event.trajectories, event.attempts, strict=True):
            if not self._current(trajectory, attempt):
                continue
            self._slots[trajectory] = event.target
            if trajectory not in self._waiting and trajectory in self._undelivered:
                self._continue(trajectory)

    def parked(self, event: e.Parked) -> None:
        """A turn of the policy has ended; the orchestrator learns that too."""
        self._emit(event)
        if self._current(event.trajectory, event.attempt):
            self._reported.add(event.trajectory)
            self._step(event.trajectory, parked=True)

    def not_parked(self, trajectory: TrajectoryId, attempt: Attempt, instance: InstanceId) -> None:
        """An instance does not have the trajectory: it is being moved, or has been, and continues where it arrives."""
        if not self._current(trajectory, attempt):
            return
        slot = self._slots.get(trajectory)
        if slot is not None and slot.instance != instance:
            self._continue(trajectory)
        elif slot is not None:
            self._undelivered.add(trajectory)

    def score(self, trajectory: TrajectoryId) -> None:
        """Finish the session and report its final reward; the trajectory has no further turn."""
        finish = self._request(trajectory, finish=True)
        self._forget(trajectory)
        self._pool.request(
            finish,
            lambda reply: self._on_score(trajectory, self._checked(trajectory, reply)),
            self._limits.timeout,
            self._first_session + trajectory,
        )

    def fail(self, trajectory: TrajectoryId) -> None:
        """The trajectory has failed: close its session."""
        self._forget(trajectory)
        self._pool.close_session(self._first_session + trajectory)

    # -- inside -----------------------------------------------------------------------------------------------

    def _current(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        entry = self._trajectories.find(trajectory)
        return entry is not None and entry.attempt == attempt and not entry.failed

    def _forget(self, trajectory: TrajectoryId) -> None:
        self._slots.pop(trajectory, None)
        self._waiting.pop(trajectory, None)
        self._reported.discard(trajectory)
        self._undelivered.discard(trajectory)
        self._texts.pop(trajectory, None)

    def _checked(self, trajectory: TrajectoryId, reply: RewardReply) -> RewardReply:
        """The final reward, unless the session had to be replayed and diverged."""
        assert isinstance(reply, m.ScoreResult)
        if self._trajectories.find(trajectory) is None or self._replayed_alike(trajectory, reply.replayed):
            return reply
        return msgspec.structs.replace(reply, reward=None, failed=_DIVERGED)

    def _step(self, trajectory: TrajectoryId, *, parked: bool) -> None:
        self._waiting[trajectory] = parked
        request = self._request(trajectory, finish=False)
        session = self._first_session + trajectory
        self._pool.request(request, lambda reply: self._answered(trajectory, reply), self._limits.timeout, session)

    def _request(self, trajectory: TrajectoryId, *, finish: bool) -> m.EnvRequest:
        entry = self._trajectories.trajectory(trajectory)
        settled = self._texts.setdefault(trajectory, [])
        turns = entry.turns(sampled=True, first=len(settled))
        if finish and entry.ended != "environment":
            turns = turns[:-1]  # the last turn was cut off, so the environment never received it
        texts = [self._tokenization.decode(tokens) for tokens in turns]
        request = m.EnvRequest(
            item=0,
            session=self._first_session + trajectory,
            problem=self._trajectories.group_of(trajectory).problem,
            texts=(*settled, *texts),
            tokens=tuple(turns[-1]) if turns else (),
            finish=finish,
        )
        settled += texts[:-1]  # all turns but the last are settled: they are not decoded again at each turn
        return request

    def _answered(self, trajectory: TrajectoryId, reply: RewardReply) -> None:
        entry = self._trajectories.find(trajectory)
        if entry is None or entry.failed or trajectory not in self._waiting:
            return
        observation = self._observation(reply)
        failure = self._failure(trajectory, reply, len(observation))
        if failure:
            self.fail(trajectory)
            self._emit(e.TrajectoryFailed(trajectory=trajectory, reason=failure))
            return
        assert isinstance(reply, m.EnvResult)
        if reply.done or not self._fits(trajectory, len(observation) + 1):
            entry.end("environment")
            self._log.append_tokens([], [(trajectory, "environment")])
        elif observation:
            self._observe(trajectory, observation)
        if self._waiting.pop(trajectory):
            self._continue(trajectory)
        else:
            self._instances.resume(trajectory, self._slots[trajectory])
        if trajectory in self._reported:
            self._reported.discard(trajectory)
            self._emit(e.Unparked(trajectory=trajectory, attempt=entry.attempt, kv_tokens=None))

    def _failure(self, trajectory: TrajectoryId, reply: RewardReply, observed: int) -> str:
        """Why the trajectory can't continue after this answer; empty if it can."""
        if isinstance(reply, m.ScoreResult) or reply.failed is not None:
            return reply.failed or "the environment failed"
        if not self._replayed_alike(trajectory, reply.replayed):
            return _DIVERGED
        opening = not self._trajectories.trajectory(trajectory).length
        fits = self._fits(trajectory, observed + 1)
        if opening and not fits:
            return "environment, reset: its observation leaves no room for a response"
        if not opening and not observed and not reply.done and fits:
            return "environment, step: it returned no observation, though it is not done"
        return ""

    def _observation(self, reply: RewardReply) -> tuple[int, ...]:
        text = reply.observation if isinstance(reply, m.EnvResult) else None
        return () if text is None else self._tokenization.observation(text)

    def _fits(self, trajectory: TrajectoryId, more: int) -> bool:
        """Whether the trajectory may have this many more tokens."""
        length = self._trajectories.trajectory(trajectory).length + more
        prompt = len(self._trajectories.group_of(trajectory).prompt)
        return length < self._limits.response_tokens and prompt + length < self._limits.context

    def _replayed_alike(self, trajectory: TrajectoryId, replayed: tuple[str, ...]) -> bool:
        """Whether a replayed session gave the recorded observations; one that left no room was not recorded."""
        if not replayed:
            return True
        recorded = [tuple(turn) for turn in self._trajectories.trajectory(trajectory).turns(sampled=False)]
        return [self._tokenization.observation(text) for text in replayed][: len(recorded)] == recorded

    def _observe(self, trajectory: TrajectoryId, tokens: tuple[int, ...]) -> None:
        entry = self._trajectories.trajectory(trajectory)
        version = self._trajectories.group_of(trajectory).version
        chunk = TokenChunk.of(
            trajectory, tokens, version=version, start=entry.length, attempt=entry.attempt, sampled=False
        )
        entry.append(chunk)
        self._log.append_tokens([chunk], [])

    def _continue(self, trajectory: TrajectoryId) -> None:
        """Send the last observation, or the end of the session, to the instance that has the trajectory."""
        self._undelivered.discard(trajectory)
        entry = self._trajectories.trajectory(trajectory)
        message: m.Message
        if entry.ended is not None:
            message = m.EndRequest(trajectory=trajectory, attempt=entry.attempt)
        else:
            tokens = entry.last_turn(sampled=False)
            assert tokens, "a trajectory continues after an observation"
            message = m.ExtendRequest(trajectory=trajectory, attempt=entry.attempt, tokens=tokens.tobytes())
        self._instances.send(self._slots[trajectory].instance, message)
