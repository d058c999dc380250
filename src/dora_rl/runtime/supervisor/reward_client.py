"""The judges, as the supervisor sees them: each answers so many questions at a time, each question has a deadline.

Invariants:
- every question is answered once: by a verdict, or by `failed` if the judge hung over it or died over it twice;
- a judge that dies while it is asked something dies of the question: that never counts against the process;
- a judge that hangs is killed; the others go on, and what else it was asked is asked elsewhere;
- the second time a question is asked it is asked alone, so whoever dies over it dies of it;
- all questions of a session go to the judge that has it, until that judge is lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.reward_guard import RewardGuard
from dora_rl.runtime.transport import messages as m

_TRIES = 2
Question = m.ScoreRequest | m.EnvRequest
Reply = m.ScoreResult | m.EnvResult
Answer = Callable[[Reply], None]


@dataclass(slots=True)
class _Question:
    message: Question
    answer: Answer
    timeout: float
    session: int | None
    tries: int = 0
    due: float = 0.0

    @property
    def item(self) -> int:
        return self.message.item


class RewardClient:
    """The pool."""

    def __init__(self, processes: ProcessManager, count: int, concurrency: int = 1) -> None:
        started = [processes.start("reward", f"reward{number}") for number in range(count)]
        self._workers = {worker.worker_id: worker for worker in started}
        self._concurrency = concurrency
        self._ready: set[str] = set()
        self._waiting: deque[_Question] = deque()
        self._asked: dict[str, dict[int, _Question]] = {place: {} for place in self._workers}
        self._homes: dict[int, str] = {}
        """Who has a session."""
        self._guests: Counter[str] = Counter()
        """Sessions of each."""
        self._item = 0
        self._again: Counter[str] = Counter()
        """Questions that each is asked a second time."""
        self._first_due = math.inf
        """No deadline is before this."""
        self._guard = RewardGuard()

    def ask(self, question: Question, answer: Answer, timeout: float, session: int | None = None) -> None:
        """Ask; `answer` is called with the reply."""
        self._item += 1
        message = msgspec.structs.replace(question, item=self._item)
        self._waiting.append(_Question(message, answer, timeout, session))
        self._hand_out()

    def drop(self, session: int) -> None:
        """Nobody will ask for this session's verdict."""
        home = self._homes.get(session)
        if home is not None:
            self._forget(session)
            self._workers[home].send(m.CloseSession(session=session))

    @property
    def pending(self) -> int:
        return len(self._waiting) + sum(map(len, self._asked.values()))

    def asked(self, process: WorkerProcess) -> bool:
        """It has a question to answer."""
        return bool(self._asked[process.worker_id])

    def ready(self, process: WorkerProcess) -> None:
        self._ready.add(process.worker_id)
        self._hand_out()

    def replied(self, process: WorkerProcess, message: Reply) -> None:
        question = self._asked[process.worker_id].pop(message.item, None)
        if question is not None:
            self._again[process.worker_id] -= question.tries > 1
            process.failures = 0
            self._guard.answered(question.item, message.failed)
            self._answer(question, message)
        self._hand_out()

    def lost(self, process: WorkerProcess) -> None:
        """A judge has died; what it was asked is asked once more, then it is to blame."""
        self._ready.discard(process.worker_id)
        for session in [session for session, home in self._homes.items() if home == process.worker_id]:
            self._forget(session)
        asked = self._asked[process.worker_id]
        for question in reversed(asked.values()):
            if question.tries < _TRIES:
                self._waiting.appendleft(question)
        blamed = [question for question in asked.values() if question.tries >= _TRIES]
        asked.clear()
        self._again[process.worker_id] = 0
        for question in blamed:
            what = "reward" if isinstance(question.message, m.ScoreRequest) else "environment"
            self._fail(question, f"the process died in which the {what} ran")
        self._hand_out()

    def overdue(self) -> list[WorkerProcess]:
        """Workers that hang over a question, which has failed then."""
        now = time.monotonic()
        hung: list[WorkerProcess] = []
        if now < self._first_due:
            return hung
        for place, asked in self._asked.items():
            late = [question for question in asked.values() if question.due <= now]
            if not late:
                continue
            hung.append(self._workers[place])
            self._ready.discard(place)
            for question in late:
                del asked[question.item]
                what = "reward" if isinstance(question.message, m.ScoreRequest) else "environment"
                self._fail(question, f"the {what} took longer than {question.timeout:g} s", late=True)
            for question in asked.values():  # it is no fault of theirs that the judge is killed
                question.tries -= 1
            self._again[place] = sum(question.tries > 1 for question in asked.values())
        self._first_due = min(
            (question.due for asked in self._asked.values() for question in asked.values()), default=math.inf
        )
        return hung

    def next_due(self) -> float | None:
        """When `overdue` is to be asked again, on the monotonic clock."""
        return None if self._first_due == math.inf else self._first_due

    def _hand_out(self) -> None:
        room = {place for place in self._ready if self._has_room(place)}
        later: deque[_Question] = deque()
        while self._waiting and room:
            question = self._waiting.popleft()
            place = self._place(question, room)
            if place is None:
                later.append(question)
                continue
            self._send(question, place)
            if not self._has_room(place):
                room.discard(place)
        self._waiting.extendleft(reversed(later))

    def _has_room(self, place: str) -> bool:
        return len(self._asked[place]) < self._concurrency and not self._again[place]

    def _place(self, question: _Question, room: set[str]) -> str | None:
        """Who is asked: the home of its session, or else whoever has least to do; nobody, if they have no room."""
        home = None if question.session is None else self._homes.get(question.session)
        places = [place for place in room if not question.tries or not self._asked[place]]  # a second time: alone
        if home is not None:
            return home if home in places else None
        return min(places, key=lambda place: (len(self._asked[place]), self._guests[place], place), default=None)

    def _send(self, question: _Question, place: str) -> None:
        if question.session is not None and question.session not in self._homes:
            self._homes[question.session] = place
            self._guests[place] += 1
        if not question.tries:
            self._guard.asked(question.item, question.message.problem.key)
        question.tries += 1
        self._again[place] += question.tries > 1
        question.due = time.monotonic() + question.timeout
        self._first_due = min(self._first_due, question.due)
        self._asked[place][question.item] = question
        self._workers[place].send(question.message)

    def _answer(self, question: _Question, reply: Reply) -> None:
        if question.session is not None and (isinstance(reply, m.ScoreResult) or reply.failed is not None):
            self._forget(question.session)  # it has come to its end
        question.answer(reply)

    def _forget(self, session: int) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self._guests[home] -= 1

    def _fail(self, question: _Question, reason: str, *, late: bool = False) -> None:
        self._guard.answered(question.item, reason, late=late)
        self._answer(question, m.ScoreResult(item=question.item, reward=None, components={}, failed=reason))
