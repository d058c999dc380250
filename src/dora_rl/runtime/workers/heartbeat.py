"""A sign of life from a process whose loop may be busy for long: a prefill, a compilation.

A thread of its own says that the process lives whenever it has said nothing else for a while. Computing lets go of the
interpreter, so the thread gets its turn; a process that is stopped, or has ended, has no threads that run.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.messages import Heartbeat


def beat(channel: Channel[Any], seconds: float) -> None:
    """From now on, and until the channel is closed."""
    threading.Thread(target=_beat, args=(channel, seconds), daemon=True, name="heart").start()


def _beat(channel: Channel[Any], seconds: float) -> None:
    while not channel.closed:
        time.sleep(seconds)
        if time.monotonic() - channel.spoke >= seconds:
            channel.send(Heartbeat())
