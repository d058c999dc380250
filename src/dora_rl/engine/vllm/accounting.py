"""Counters of vLLM's work, and where its time goes.

All slots decode in one batch, so an instance has one account. The time of a step is split in proportion to the tokens
of each activity and version.
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
    """Counters and the time account of one engine."""

    def __init__(self, clock: Clock) -> None:
        self.stats = Stats()
        self.account = TimeAccount(clock(), Activity(ActivityLabel.IDLE, cause=IdleCause(reason=IdleReason.STARTING)))
        self._clock = clock
        self._work: Counter[Activity] = Counter()
        self._recomputed = 0

    def record_prefill(self, sequence: VllmSequence, cached: int) -> None:
        """Count the tokens of a sequence that vLLM has computed; it had the KV of `cached` tokens."""
        length = len(sequence.tokens)
        again = max(0, min(sequence.known, length) - cached)
        fresh = max(0, length - cached - again)
        self.stats.shared += cached
        self.stats.reprefilled += again
        self.stats.prefilled += fresh
        self._work[Activity(ActivityLabel.REPREFILL, sequence.request.version)] += again
        self._work[Activity(ActivityLabel.PREFILL, sequence.request.version)] += fresh

    def record_decode(self, version: Version, tokens: int) -> None:
        """Count sampled tokens of a version."""
        self.stats.decoded += tokens
        self._work[Activity(ActivityLabel.DECODE, version)] += tokens

    def record_preemptions(self, counters: Counters) -> bool:
        """Take over vLLM's counters of pre-emptions and recomputed tokens; return whether the former have grown."""
        self.stats.reprefilled += counters.recomputed - self._recomputed
        self._recomputed = counters.recomputed
        more = counters.preempted > self.stats.preempted
        self.stats.preempted = self.stats.recomputed = counters.preempted
        return more

    def record_step(self, start: Nanoseconds, versions: set[Version]) -> None:
        """Account the time of a step for these versions; a step without tokens has computed part of a prompt."""
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

    def record_activity(self, activity: Activity, start: Nanoseconds) -> None:
        """Account the time since `start` to this activity."""
        before = self.account.current
        self.account.switch(start, activity)
        self.account.switch(self._clock(), before)

    def record_idle(self, cause: IdleCause) -> None:
        """Account the time from now on to idling for this cause."""
        self.account.switch(self._clock(), Activity(ActivityLabel.IDLE, cause=cause))
