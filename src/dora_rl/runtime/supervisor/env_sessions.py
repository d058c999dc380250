"""Trajectories of several turns: the policy speaks, parks with its KV, and goes on after what its environment said.

    Parked --text--> judge --observation--> books --tokens--> the instance that has it now --> Unparked
                       `---done--> End --> Generated --> Score --> the session's verdict

Invariants:
- what an environment says is in the books before anybody acts on it, so wherever the trajectory goes on, it is there;
- a turn that waits for its environment is not decoded, also if its instance is lost meanwhile;
- a session that is lost with its process is played again from the texts so far; if it answers otherwise than before,
  the trajectory has failed;
- what is said of a former attempt is ignored: the trajectory is somewhere else by now;
- the orchestrator hears `Unparked` once for each `Parked`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Attempt, InstanceId, SlotId, TrajectoryId
from dora_rl.runtime.supervisor.reward_client import RewardClient
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry, TrajectoryEntry
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.launch.process_manager import WorkerProcess

Submit = Callable[[TrajectoryId, SlotId], None]
_OTHERWISE = "its environment was lost, and answered otherwise when it was played again"


class Trajectories(Protocol):
    """What is known of the trajectories."""

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None: ...

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry: ...

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry: ...


class Written(Protocol):
    """Where what was said is written down."""

    def append_tokens(self, chunks: list[TokenChunk], ended: list[tuple[TrajectoryId, str]]) -> None: ...


class EnvSessions:
    """The turns of a run's trajectories, or of an evaluation's."""

    def __init__(
        self,
        books: Trajectories,
        text: Tokenization,
        judges: RewardClient,
        ledger: Written,
        find: Callable[[str], WorkerProcess | None],
        submit: Submit,
        happen: Callable[[e.Event], None],
        most_tokens: int,
        most_context: int,
        timeout: float,
        first_session: int = 0,
    ) -> None:
        """A trajectory's session has its number, counted from `first_session`."""
        self._books = books
        self._text = text
        self._judges = judges
        self._ledger = ledger
        self._find = find
        self._submit = submit
        self._happen = happen
        self._most_tokens = most_tokens
        self._most_context = most_context
        self._timeout = timeout
        self._first_session = first_session
        self._place: dict[TrajectoryId, SlotId] = {}
        """Where it is, or is to go on."""
        self._waiting: dict[TrajectoryId, bool] = {}
        """Those whose environment is asked: is their KV parked at their place?"""
        self._told: set[TrajectoryId] = set()
        """Those that the orchestrator knows to be parked."""
        self._unheard: set[TrajectoryId] = set()
        """Those that were being moved when they should have gone on."""
        self._texts: dict[TrajectoryId, list[str]] = {}
        """What the policy said in turns that were answered."""

    # -- what happens to a trajectory -------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Begin its environment, then submit it."""
        self._place[trajectory] = slot
        self._ask(trajectory, parked=False)

    def resume(self, trajectory: TrajectoryId, attempt: Attempt, slot: SlotId) -> None:
        """It lost its place; at the new one it goes on when its environment has answered."""
        self._place[trajectory] = slot
        self._unheard.discard(trajectory)
        self._told.discard(trajectory)
        book = self._books.trajectory(trajectory)
        if trajectory in self._waiting:
            self._waiting[trajectory] = False
        elif not book.response or self._text.stopped(book.last_said(observed=False)):
            self._ask(trajectory, parked=False)
        else:
            self._submit(trajectory, slot)
            return
        self._told.add(trajectory)
        self._happen(e.Parked(trajectory=trajectory, attempt=attempt, kv_tokens=None))

    def moved(self, event: e.Moved) -> None:
        """They are somewhere else now. What was said to their former place got lost on the way: say it again."""
        for trajectory, attempt in zip(event.trajectories, event.attempts, strict=True):
            if not self._current(trajectory, attempt):
                continue
            self._place[trajectory] = event.target
            if trajectory not in self._waiting and trajectory in self._unheard:
                self._go_on(trajectory)

    def parked(self, event: e.Parked) -> None:
        """A turn has ended; the orchestrator hears it too."""
        self._happen(event)
        if self._current(event.trajectory, event.attempt):
            self._told.add(event.trajectory)
            self._ask(event.trajectory, parked=True)

    def failed(self, trajectory: TrajectoryId) -> None:
        """It is over, and nobody will ask for its verdict."""
        self._forget(trajectory)
        self._judges.drop(self._first_session + trajectory)

    def refused(self, trajectory: TrajectoryId, attempt: Attempt, by: InstanceId) -> None:
        """An instance did not have it parked: it is being moved, or has been; where it arrives it is told again."""
        if not self._current(trajectory, attempt):
            return
        place = self._place.get(trajectory)
        if place is not None and place.instance != by:
            self._go_on(trajectory)
        elif place is not None:
            self._unheard.add(trajectory)

    def score(self, trajectory: TrajectoryId, answer: Callable[[m.ScoreResult], None]) -> None:
        """The verdict of its session; it has no turn to come."""
        finish = self._play(trajectory, finish=True)
        self._forget(trajectory)
        self._judges.ask(
            finish,
            lambda reply: answer(self._verdict(trajectory, _judged(reply))),
            self._timeout,
            self._first_session + trajectory,
        )

    # -- inside -----------------------------------------------------------------------------------------------

    def _current(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        book = self._books.find(trajectory)
        return book is not None and book.attempt == attempt and not book.failed

    def _forget(self, trajectory: TrajectoryId) -> None:
        """It has no turn to come."""
        self._place.pop(trajectory, None)
        self._waiting.pop(trajectory, None)
        self._told.discard(trajectory)
        self._unheard.discard(trajectory)
        self._texts.pop(trajectory, None)

    def _verdict(self, trajectory: TrajectoryId, verdict: m.ScoreResult) -> m.ScoreResult:
        """A session that answered otherwise when it was played again is worth nothing."""
        if self._books.find(trajectory) is None or self._as_before(trajectory, verdict.replayed):
            return verdict
        return msgspec.structs.replace(verdict, reward=None, failed=_OTHERWISE)

    def _ask(self, trajectory: TrajectoryId, *, parked: bool) -> None:
        self._waiting[trajectory] = parked
        message = self._play(trajectory, finish=False)
        session = self._first_session + trajectory
        self._judges.ask(message, lambda reply: self._answered(trajectory, reply), self._timeout, session)

    def _play(self, trajectory: TrajectoryId, *, finish: bool) -> m.EnvRequest:
        book = self._books.trajectory(trajectory)
        settled = self._texts.setdefault(trajectory, [])
        said = book.spans(observed=False, first=len(settled))
        if finish and book.ended != "environment":
            said = said[:-1]  # cut off: its environment was never told
        texts = [self._text.decode(tokens) for tokens in said]
        # All turns but the last are settled: they need not be decoded again at each turn.
        play = m.EnvRequest(
            item=0,
            session=self._first_session + trajectory,
            problem=self._books.group_of(trajectory).problem,
            texts=(*settled, *texts),
            tokens=tuple(said[-1]) if said else (),
            finish=finish,
        )
        settled += texts[:-1]
        return play

    def _answered(self, trajectory: TrajectoryId, reply: m.ScoreResult | m.EnvResult) -> None:
        book = self._books.find(trajectory)
        if book is None or book.failed or trajectory not in self._waiting:
            return
        said = self._said(reply)
        trouble = self._trouble(trajectory, reply, len(said))
        if trouble:
            self.failed(trajectory)
            self._happen(e.TrajectoryFailed(trajectory=trajectory, reason=trouble))
            return
        assert isinstance(reply, m.EnvResult)
        over = reply.done or not self._fits(trajectory, len(said) + 1)
        if over:
            book.ended = "environment"
            self._ledger.append_tokens([], [(trajectory, "environment")])
        elif said:
            self._observe(trajectory, said)
        if self._waiting.pop(trajectory):
            self._go_on(trajectory)
        else:
            self._submit(trajectory, self._place[trajectory])
        if trajectory in self._told:
            self._told.discard(trajectory)
            self._happen(e.Unparked(trajectory=trajectory, attempt=book.attempt, kv_tokens=None))

    def _trouble(self, trajectory: TrajectoryId, reply: m.ScoreResult | m.EnvResult, said: int) -> str:
        """Why it can't go on after this."""
        if isinstance(reply, m.ScoreResult) or reply.failed is not None:
            return reply.failed or "the environment failed"
        if not self._as_before(trajectory, reply.replayed):
            return _OTHERWISE
        opening = not self._books.trajectory(trajectory).response
        fits = self._fits(trajectory, said + 1)
        if opening and not fits:
            return "environment, reset: what it said leaves no room for a response"
        if not opening and not said and not reply.done and fits:
            return "environment, step: it said nothing, though it is not done"
        return ""

    def _said(self, reply: m.ScoreResult | m.EnvResult) -> tuple[int, ...]:
        said = reply.observation if isinstance(reply, m.EnvResult) else None
        return () if said is None else self._text.observation(said)

    def _fits(self, trajectory: TrajectoryId, more: int) -> bool:
        """Whether it may have so many tokens more."""
        response, prompt = len(self._books.trajectory(trajectory).response), self._books.group_of(trajectory).prompt
        return response + more < self._most_tokens and len(prompt) + response + more < self._most_context

    def _as_before(self, trajectory: TrajectoryId, replayed: tuple[str, ...]) -> bool:
        """What was played again is what was said the first time; what left no room for more was not written down."""
        if not replayed:
            return True
        said = [tuple(tokens) for tokens in self._books.trajectory(trajectory).spans(observed=True)]
        return [self._text.observation(one) for one in replayed][: len(said)] == said

    def _observe(self, trajectory: TrajectoryId, said: tuple[int, ...]) -> None:
        book = self._books.trajectory(trajectory)
        version = self._books.group_of(trajectory).version
        chunk = TokenChunk.of(
            trajectory, said, version=version, start=len(book.response), attempt=book.attempt, sampled=False
        )
        book.take(chunk)
        self._ledger.append_tokens([chunk], [])

    def _go_on(self, trajectory: TrajectoryId) -> None:
        """Tell the instance that has it what the environment said last, or that it is over."""
        self._unheard.discard(trajectory)
        book = self._books.trajectory(trajectory)
        process = self._find(self._place[trajectory].instance)
        if process is None:
            return
        if book.ended is not None:
            process.send(m.EndRequest(trajectory=trajectory, attempt=book.attempt))
        else:
            tokens = book.last_said(observed=True)
            assert tokens
            process.send(m.ExtendRequest(trajectory=trajectory, attempt=book.attempt, tokens=tokens.tobytes()))


def _judged(reply: m.ScoreResult | m.EnvResult) -> m.ScoreResult:
    assert isinstance(reply, m.ScoreResult)
    return reply
