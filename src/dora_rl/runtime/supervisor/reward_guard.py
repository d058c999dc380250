"""Ends a run at once whose reward functions or environments fail for every response.

The sample is the first request for each of the first prompts, in the order in which requests are sent: not in the order
of the answers, since a failure may return sooner than a success. The run ends if the whole sample has failed with the
same reason before any request has succeeded.

Invariants:
- one success, of any request, ends the watch for good: occasional failures never end a run. Rewards that start to fail
  later are left to `failure_guard`, which counts groups that fail in a row;
- one prompt that always fails never ends a run, however many responses to it are scored;
- requests that were sent before the first timeout do not count: what they wait for may still be starting.
"""

from __future__ import annotations

from dora_rl.core.errors import RunError

PROMPTS = 16
"""Prompts that have to fail. If half of all prompts can't be scored, one run in 65,536 has this bad luck."""


class RewardGuard:
    """The first requests of a run, until one succeeds."""

    def __init__(self) -> None:
        self._watching = True
        self._prompts: set[str] = set()
        self._sample: set[int] = set()
        """Numbers of the requests in the sample, one for each prompt."""
        self._reasons: dict[int, str] = {}
        """Failed requests of the sample, with their reasons."""
        self._late = False
        """A request timed out; the sample was restarted with the requests that were sent after that."""

    def asked(self, item: int, prompt: str) -> None:
        """A request is sent for the first time."""
        if self._watching and len(self._prompts) < PROMPTS and prompt not in self._prompts:
            self._sample.add(item)
            self._prompts.add(prompt)

    def answered(self, item: int, failed: str | None, *, late: bool = False) -> None:
        """A request has its answer; raises `RunError` if the whole sample has failed with the same reason."""
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
            f"{reasons.pop()}; fix the reward function or the environment, then resume the run"
        )
