"""Async functions of users, finished from code that is not async.

One loop for all calls of an owner: clients that such functions keep between calls are bound to it. It is closed with
its owner. `Loop` runs in the thread that calls, and can't be used from within a running loop; `SharedLoop` has a thread
of its own, and any number of threads may call at once.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
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


class SharedLoop:
    """Where awaitables of one owner run together."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        threading.Thread(target=_run, args=(loop,), daemon=True, name="environments").start()
        self.close = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)

    def finish(self, result: Any) -> Any:
        """What a call comes to in the end, async or not."""
        if not inspect.isawaitable(result):
            return result
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _awaited(result: Any) -> Any:
    return await result
