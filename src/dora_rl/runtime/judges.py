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

from dora_rl.envs.data import Problem
from dora_rl.runtime import messages as m
from dora_rl.runtime.processes import Process, Processes

_TRIES = 2
Answer = Callable[[m.Judged], None]


@dataclass(slots=True)
class _Question:
    message: m.Judge
    answer: Answer
    tries: int = 0
    due: float = 0.0


class Judges:
    """The pool."""

    def __init__(self, processes: Processes, count: int, timeout: float) -> None:
        self._processes = processes
        self._timeout = timeout
        self._workers = [processes.start("judge", f"judge{number}", 1) for number in range(count)]
        self._ready: set[str] = set()
        self._waiting: deque[_Question] = deque()
        self._asked: dict[str, _Question] = {}
        self._item = 0

    def ask(self, problem: Problem, completion: str, tokens: tuple[int, ...], answer: Answer) -> None:
        """Have a response judged; `answer` is called with the verdict."""
        self._item += 1
        message = m.Judge(item=self._item, problem=problem, completion=completion, tokens=tokens)
        self._waiting.append(_Question(message, answer))
        self._hand_out()

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._asked)

    def ready(self, process: Process) -> None:
        self._ready.add(process.place)
        self._hand_out()

    def judged(self, process: Process, message: m.Judged) -> None:
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
            self._fail(self._asked.pop(worker.place), f"the reward took longer than {self._timeout:g} s")
        return hung

    def next_due(self) -> float | None:
        """When the first deadline is, on the monotonic clock."""
        return min((question.due for question in self._asked.values()), default=None)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._waiting:
                return
            if worker.place in self._ready and worker.place not in self._asked:
                question = self._waiting.popleft()
                question.tries += 1
                question.due = time.monotonic() + self._timeout
                self._asked[worker.place] = question
                worker.send(question.message)

    def _fail(self, question: _Question, reason: str) -> None:
        question.answer(m.Judged(item=question.message.item, reward=None, parts={}, failed=reason))
