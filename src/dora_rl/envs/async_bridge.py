"""Runs users' async functions from synchronous code.

All calls of one owner share one event loop, since clients that such functions keep between calls are bound to it. The
loop is closed with its owner. `Loop` runs in the calling thread and can't be used inside a running loop; `SharedLoop`
has its own thread, and any number of threads may call it at once.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from typing import Any


class Loop:
    """The event loop of one owner, run in the calling thread."""

    def __init__(self) -> None:
        runner = asyncio.Runner()
        self._runner = runner
        self.close = weakref.finalize(self, runner.close)

    def finish(self, result: Any) -> Any:
        """The result of a call; an awaitable is awaited."""
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result


class SharedLoop:
    """The event loop of one owner, in its own thread, where many awaitables run at once."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        threading.Thread(target=_run, args=(loop,), daemon=True, name="environments").start()
        self.close = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)

    def finish(self, result: Any) -> Any:
        """The result of a call; an awaitable is awaited."""
        if not inspect.isawaitable(result):
            return result
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _awaited(result: Any) -> Any:
    return await result
