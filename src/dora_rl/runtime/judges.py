"""The judges, as the supervisor sees them: one question each at a time, each with a deadline.

Invariants:
- every question is answered once: by a verdict, or by `failed` if the judge hung or died over it twice;
- a judge that hangs is killed; the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dora_rl.runtime import messages as m
from dora_rl.runtime.processes import Process, Processes

_TRIES = 2
Question = m.Judge | m.Play
Reply = m.Judged | m.Played
Answer = Callable[[Reply], None]


@dataclass(slots=True)
class _Question:
    message: Question
    answer: Answer
    timeout: float
    worker: str | None
    """Who alone can answer it."""
    tries: int = 0
    due: float = 0.0


class Judges:
    """The pool."""

    def __init__(self, processes: Processes, count: int) -> None:
        self._workers = [processes.start("judge", f"judge{number}") for number in range(count)]
        self._ready: set[str] = set()
        self._waiting: deque[_Question] = deque()
        self._asked: dict[str, _Question] = {}
        self._item = 0

    def ask(self, question: Question, answer: Answer, timeout: float, session: int | None = None) -> None:
        """Ask; `answer` is called with the reply. All questions of a session go to the same judge."""
        self._item += 1
        worker = None if session is None else self._workers[session % len(self._workers)].place
        message = msgspec.structs.replace(question, item=self._item)
        self._waiting.append(_Question(message, answer, timeout, worker))
        self._hand_out()

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._asked)

    def ready(self, process: Process) -> None:
        self._ready.add(process.place)
        self._hand_out()

    def replied(self, process: Process, message: Reply) -> None:
        question = self._asked.pop(process.place, None)
        if question is not None:
            assert question.message.item == message.item
            process.failures = 0
            question.answer(message)
        self._hand_out()

    def lost(self, process: Process) -> None:
        """A judge has died; its question is asked once more, then it is to blame."""
        self._ready.discard(process.place)
        question = self._asked.pop(process.place, None)
        if question is not None and question.tries < _TRIES:
            self._waiting.appendleft(question)
        elif question is not None:
            self._fail(question, "the process that judged it died")
        self._hand_out()

    def overdue(self) -> list[Process]:
        """Judges that hang over a question, which has failed then."""
        now = time.monotonic()
        hung = [
            worker for worker in self._workers if worker.place in self._asked and self._asked[worker.place].due <= now
        ]
        for worker in hung:
            self._ready.discard(worker.place)
            question = self._asked.pop(worker.place)
            what = "reward" if isinstance(question.message, m.Judge) else "environment"
            self._fail(question, f"the {what} took longer than {question.timeout:g} s")
        return hung

    def next_due(self) -> float | None:
        """When the first deadline is, on the monotonic clock."""
        return min((question.due for question in self._asked.values()), default=None)

    def _hand_out(self) -> None:
        free = {worker.place: worker for worker in self._workers if worker.place in self._ready}
        for place in self._asked:
            free.pop(place, None)
        later: deque[_Question] = deque()
        while self._waiting and free:
            question = self._waiting.popleft()
            place = next(iter(free)) if question.worker is None else question.worker
            worker = free.pop(place, None)
            if worker is None:
                later.append(question)
                continue
            question.tries += 1
            question.due = time.monotonic() + question.timeout
            self._asked[place] = question
            worker.send(question.message)
        self._waiting.extendleft(reversed(later))

    def _fail(self, question: _Question, reason: str) -> None:
        question.answer(m.Judged(item=question.message.item, reward=None, parts={}, failed=reason))
