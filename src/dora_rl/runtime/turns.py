"""Trajectories of several turns: the policy speaks, parks with its KV, and goes on after what its environment said.

    Parked --text--> judge --observation--> books --tokens--> the instance that has it now --> Unparked
                       `---done--> End --> Generated --> Score --> the session's verdict

Invariants:
- what an environment says is in the books before anybody acts on it, so wherever the trajectory goes on, it is there;
- a turn that waits for its environment is not decoded, also if its instance is lost meanwhile;
- a session that is lost with its process is played again from the texts so far; if it answers otherwise than before,
  the trajectory has failed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from dora_rl.core import events as e
from dora_rl.core.nouns import Attempt, InstanceId, SlotId, TrajectoryId
from dora_rl.ledger.ledger import Ledger
from dora_rl.ledger.writing import SaidRow
from dora_rl.runtime import messages as m
from dora_rl.runtime.books import Books
from dora_rl.runtime.judges import Judges
from dora_rl.runtime.text import Text

if TYPE_CHECKING:
    from dora_rl.runtime.processes import Process

Submit = Callable[[TrajectoryId, SlotId], None]


class Turns:
    """The turns of a run's trajectories."""

    def __init__(
        self,
        books: Books,
        text: Text,
        judges: Judges,
        ledger: Ledger,
        find: Callable[[str], Process | None],
        submit: Submit,
        happen: Callable[[e.Event], None],
        most_tokens: int,
        timeout: float,
    ) -> None:
        self._books = books
        self._text = text
        self._judges = judges
        self._ledger = ledger
        self._find = find
        self._submit = submit
        self._happen = happen
        self._most_tokens = most_tokens
        self._timeout = timeout
        self._place: dict[TrajectoryId, SlotId] = {}
        """Where it is, or is to go on."""
        self._waiting: dict[TrajectoryId, bool] = {}
        """Those whose environment is asked: is their KV parked at their place?"""
        self._unheard: set[TrajectoryId] = set()
        """Those that were being moved when they should have gone on."""

    # -- what happens to a trajectory -------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Begin its environment, then submit it."""
        self._place[trajectory] = slot
        self._ask(trajectory, parked=False)

    def resume(self, trajectory: TrajectoryId, attempt: Attempt, slot: SlotId) -> None:
        """It lost its place; at the new one it goes on when its environment has answered."""
        self._place[trajectory] = slot
        if trajectory in self._waiting:
            self._waiting[trajectory] = False
        elif not self._books.trajectory(trajectory).response or self._text.stopped(self._spoken(trajectory)):
            self._ask(trajectory, parked=False)
        else:
            self._submit(trajectory, slot)
            return
        self._happen(e.Parked(trajectory=trajectory, attempt=attempt, kv_tokens=0))

    def moved(self, trajectories: tuple[TrajectoryId, ...], target: SlotId) -> None:
        """They are somewhere else now. What was said to their former place got lost on the way: say it again."""
        for trajectory in trajectories:
            self._place[trajectory] = target
            if trajectory not in self._waiting and trajectory in self._unheard:
                self._go_on(trajectory)

    def parked(self, event: e.Parked) -> None:
        """A turn has ended; the orchestrator hears it too."""
        self._happen(event)
        self._ask(event.trajectory, parked=True)

    def forget(self, trajectory: TrajectoryId) -> None:
        """It is over, one way or the other."""
        self._place.pop(trajectory, None)
        self._waiting.pop(trajectory, None)
        self._unheard.discard(trajectory)

    def refused(self, trajectory: TrajectoryId, by: InstanceId) -> None:
        """An instance did not have it parked: it is being moved, or has been; where it arrives it is told again."""
        place = self._place.get(trajectory)
        if place is not None and place.instance != by:
            self._go_on(trajectory)
        elif place is not None:
            self._unheard.add(trajectory)

    def score(self, trajectory: TrajectoryId, answer: Callable[[m.Judged], None]) -> None:
        """The verdict of its session; it has no turn to come."""
        self.forget(trajectory)
        finish = self._play(trajectory, finish=True)
        self._judges.ask(finish, lambda reply: answer(_judged(reply)), self._timeout, trajectory)

    # -- inside -----------------------------------------------------------------------------------------------

    def _ask(self, trajectory: TrajectoryId, *, parked: bool) -> None:
        self._waiting[trajectory] = parked
        message = self._play(trajectory, finish=False)
        self._judges.ask(message, lambda reply: self._answered(trajectory, reply), self._timeout, trajectory)

    def _play(self, trajectory: TrajectoryId, *, finish: bool) -> m.Play:
        spans = self._books.trajectory(trajectory).spans()
        return m.Play(
            item=0,
            session=trajectory,
            problem=self._books.group_of(trajectory).problem,
            texts=tuple(self._text.decode(tokens) for observed, tokens in spans if not observed),
            tokens=tuple(self._spoken(trajectory)),
            finish=finish,
        )

    def _spoken(self, trajectory: TrajectoryId) -> array[int]:
        """What the policy said last."""
        spans = self._books.trajectory(trajectory).spans()
        return spans[-1][1] if spans and not spans[-1][0] else array("i")

    def _answered(self, trajectory: TrajectoryId, reply: m.Judged | m.Played) -> None:
        book = self._books.find(trajectory)
        if book is None or book.failed or trajectory not in self._waiting:
            return
        if isinstance(reply, m.Judged) or reply.failed is not None:
            self.forget(trajectory)
            self._happen(e.TrajectoryFailed(trajectory=trajectory, reason=reply.failed or "the environment failed"))
            return
        if not self._as_before(trajectory, reply.replayed):
            self.forget(trajectory)
            reason = "its environment was lost, and answered otherwise when it was played again"
            self._happen(e.TrajectoryFailed(trajectory=trajectory, reason=reason))
            return
        opening = not book.response
        said = () if reply.observation is None else self._text.observation(reply.observation)
        over = reply.done or len(book.response) + len(said) + 1 >= self._most_tokens
        if over:
            book.ended = "environment"
            self._ledger.said([], [(trajectory, "environment")])
        elif said:
            self._observe(trajectory, said)
        if self._waiting.pop(trajectory):
            self._go_on(trajectory)
        else:
            self._submit(trajectory, self._place[trajectory])
        if not opening:
            self._happen(e.Unparked(trajectory=trajectory, attempt=book.attempt, kv_tokens=0))

    def _as_before(self, trajectory: TrajectoryId, replayed: tuple[str, ...]) -> bool:
        """What was played again is what was said the first time."""
        said = [tuple(tokens) for observed, tokens in self._books.trajectory(trajectory).spans() if observed]
        again = [self._text.observation(one) for one in replayed]
        return not again or said[-len(again) :] == again

    def _observe(self, trajectory: TrajectoryId, said: tuple[int, ...]) -> None:
        book = self._books.trajectory(trajectory)
        tokens = array("i", said).tobytes()
        version = self._books.group_of(trajectory).version
        nothing = array("f", [0.0] * len(said)).tobytes()
        row = SaidRow(trajectory, len(book.response), version, tokens, nothing, 1)
        book.take(row)
        self._ledger.said([row], [])

    def _go_on(self, trajectory: TrajectoryId) -> None:
        """Tell the instance that has it what the environment said last, or that it is over."""
        self._unheard.discard(trajectory)
        book = self._books.trajectory(trajectory)
        process = self._find(self._place[trajectory].instance)
        if process is None:
            return
        if book.ended is not None:
            process.send(m.End(trajectory=trajectory, attempt=book.attempt))
        else:
            observed, tokens = book.spans()[-1]
            assert observed
            process.send(m.Extend(trajectory=trajectory, attempt=book.attempt, tokens=tokens.tobytes()))


def _judged(reply: m.Judged | m.Played) -> m.Judged:
    assert isinstance(reply, m.Judged)
    return reply
