"""Async functions of users, finished from code that is not async.

One loop for all calls of an owner: clients that such functions keep between calls are bound to it. It is closed with
its owner, and can't be used from within a running loop.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from typing import Any


class Loop:
    """Where awaitables of one owner run."""

    def __init__(self) -> None:
        runner = asyncio.Runner()
        self._runner = runner
        self.close = weakref.finalize(self, runner.close)

    def finish(self, result: Any) -> Any:
        """What a call comes to in the end, async or not."""
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result
