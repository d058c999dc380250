"""What is counted of vLLM's work, and where its time went.

All slots decode in one batch, so an instance has one account. A step's time is split by tokens over what was done and
for which version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import Nanoseconds, Version
from dora_rl.engine.stats import Stats

if TYPE_CHECKING:
    from dora_rl.engine.vllm.core import Counters
    from dora_rl.engine.vllm.sequence import VllmSequence

Clock = Callable[[], Nanoseconds]


class StepAccounting:
    """Counts and time of one engine."""

    def __init__(self, clock: Clock) -> None:
        self.stats = Stats()
        self.account = TimeAccount(clock(), Activity(ActivityLabel.IDLE, cause=IdleCause(reason=IdleReason.STARTING)))
        self._clock = clock
        self._work: Counter[Activity] = Counter()
        self._recomputed = 0

    def prefilled(self, sequence: VllmSequence, cached: int) -> None:
        """vLLM has computed a sequence's tokens up to here, but for those whose KV it had."""
        length = len(sequence.tokens)
        again = max(0, min(sequence.known, length) - cached)
        fresh = max(0, length - cached - again)
        self.stats.shared += cached
        self.stats.reprefilled += again
        self.stats.prefilled += fresh
        self._work[Activity(ActivityLabel.REPREFILL, sequence.request.version)] += again
        self._work[Activity(ActivityLabel.PREFILL, sequence.request.version)] += fresh

    def decoded(self, version: Version, tokens: int) -> None:
        self.stats.decoded += tokens
        self._work[Activity(ActivityLabel.DECODE, version)] += tokens

    def preempted(self, counters: Counters) -> bool:
        """Take over what vLLM has put aside, and computed again when it came back; True if there is more of it."""
        self.stats.reprefilled += counters.recomputed - self._recomputed
        self._recomputed = counters.recomputed
        more = counters.preempted > self.stats.preempted
        self.stats.preempted = self.stats.recomputed = counters.preempted
        return more

    def stepped(self, start: Nanoseconds, versions: set[Version]) -> None:
        """A step for these versions is over; one that gave nothing has computed a part of a prompt."""
        end = self._clock()
        self.stats.together = max(self.stats.together, len(versions))
        total = self._work.total()
        if not total:
            self.account.switch(start, Activity(ActivityLabel.PREFILL, max(versions)))
        now = start
        for activity, tokens in self._work.items():
            if tokens:
                self.account.switch(now, activity)
                now += (end - start) * tokens // total
        self.account.settle(end)
        self._work.clear()

    def spent(self, activity: Activity, start: Nanoseconds) -> None:
        """The time since `start` went into this."""
        before = self.account.current
        self.account.switch(start, activity)
        self.account.switch(self._clock(), before)

    def idle(self, cause: IdleCause) -> None:
        """There is nothing to do, and why."""
        self.account.switch(self._clock(), Activity(ActivityLabel.IDLE, cause=cause))
