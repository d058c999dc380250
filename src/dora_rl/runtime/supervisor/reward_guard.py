"""Notices at once that rewards, or environments, fail whatever they are asked, and ends the run with the reason.

The sample is the first question about each of the first prompts, in the order in which questions are asked: not in the
order of the answers, since one that fails may come sooner than one that succeeds. The run ends if the whole sample has
failed with the same reason before any question has been answered well.

Invariants:
- a single answer that is not a failure, to any question, ends the watch for good: what fails now and then never ends a
  run. Rewards that begin to fail later are left to `verdicts`, which counts groups that fail in a row;
- one prompt that always fails never ends a run, however many responses to it are scored;
- questions that were asked before the first one took too long do not count: what they wait for may be starting up.
"""

from __future__ import annotations

from dora_rl.core.errors import RunError

PROMPTS = 16
"""Different prompts that have to fail. If half of all can't be scored, one run in 65,536 has this bad luck."""


class RewardGuard:
    """The first questions of a run, until one is answered well."""

    def __init__(self) -> None:
        self._watching = True
        self._prompts: set[str] = set()
        self._sample: set[int] = set()
        """Items of the questions in the sample, one for each prompt."""
        self._reasons: dict[int, str] = {}
        """Questions of the sample that failed."""
        self._late = False
        """A question has taken too long; the sample began anew with the questions that were asked after that."""

    def asked(self, item: int, prompt: str) -> None:
        """A question is asked for the first time."""
        if self._watching and len(self._prompts) < PROMPTS and prompt not in self._prompts:
            self._sample.add(item)
            self._prompts.add(prompt)

    def answered(self, item: int, failed: str | None, *, late: bool = False) -> None:
        """A question has its answer; raises `RunError` if all of the sample have failed alike."""
        if not self._watching:
            return
        if failed is None:
            self._watching = False
        elif late and not self._late:
            self._late = True
            self._sample, self._prompts, self._reasons = set(), set(), {}
        elif item in self._sample:
            self._reasons[item] = failed
            self._compare()

    def _compare(self) -> None:
        if len(self._reasons) < PROMPTS:
            return
        reasons = set(self._reasons.values())
        if len(reasons) > 1:
            self._watching = False
            return
        raise RunError(
            f"no response could be scored, and the first ones to {PROMPTS} prompts all failed with the same reason: "
            f"{reasons.pop()}; mend the reward or the environment, then resume the run"
        )
