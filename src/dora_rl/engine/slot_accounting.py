"""Where the time of the built-in engine's slots goes.

Invariant: every moment of a slot has one label, so the totals of an account add up to the time since the engine began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity

if TYPE_CHECKING:
    from dora_rl.core.types import Nanoseconds
    from dora_rl.engine.slots import EngineSlot
    from dora_rl.engine.step_execution import TokenCounts

_SPARE = IdleCause(reason=IdleReason.SPARE)
_NO_PROMPTS = IdleCause(reason=IdleReason.NO_PROMPTS)


def account_step(
    slot: EngineSlot, work: TokenCounts | None, start: Nanoseconds, end: Nanoseconds, *, others: bool
) -> None:
    """Account the time of one step; `work` is None for a slot that computed nothing, `others` if other slots did."""
    if work is None:
        _account_no_work(slot, start, end, others=others)
    else:
        slot.idle = _NO_PROMPTS
        _account_work(slot, work, start, end)
    slot.account.settle(end)


def _account_no_work(slot: EngineSlot, start: Nanoseconds, end: Nanoseconds, *, others: bool) -> None:
    """An idle slot idles for the cause that it was given, except while other slots of its instance compute."""
    account = slot.account
    if slot.loading is not None:
        account.switch(start, Activity(ActivityLabel.LOAD, slot.loading.version))
    elif others:
        account.switch(start, Activity(ActivityLabel.IDLE, cause=_SPARE))
        account.switch(end, Activity(ActivityLabel.IDLE, cause=slot.idle))
    elif account.current.label is not ActivityLabel.IDLE:
        account.switch(start, Activity(ActivityLabel.IDLE, cause=slot.idle))


def _account_work(slot: EngineSlot, work: TokenCounts, start: Nanoseconds, end: Nanoseconds) -> None:
    """A slot that prefilled and decoded in one step: the time is split in proportion to the tokens."""
    total = sum(work)
    now = start
    shares = (
        (ActivityLabel.REPREFILL, work.reprefilled),
        (ActivityLabel.PREFILL, work.prefilled),
        (ActivityLabel.DECODE, work.decoded),
    )
    for label, tokens in shares:
        if tokens:
            slot.account.switch(now, Activity(label, slot.version))
            now += (end - start) * tokens // total


def account_migration(slot: EngineSlot, start: Nanoseconds, end: Nanoseconds) -> None:
    """The time from `start` to `end` went into moving requests of this slot."""
    before = slot.account.current
    slot.account.switch(start, Activity(ActivityLabel.MIGRATE, slot.version))
    slot.account.switch(end, before)
