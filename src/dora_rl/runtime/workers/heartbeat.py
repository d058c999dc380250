"""Heartbeats of a worker whose main loop may be busy for a long time, for example in a prefill or a compilation.

A daemon thread sends a heartbeat whenever the worker has sent nothing else for a while. Computation releases the
interpreter lock, so the thread gets its turn; a process that is stopped or has ended runs no threads.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.messages import Heartbeat


def start_heartbeat(channel: Channel[Any], seconds: float) -> None:
    """Send heartbeats from now on, until the channel is closed."""
    threading.Thread(target=_send, args=(channel, seconds), daemon=True, name="heartbeat").start()


def _send(channel: Channel[Any], seconds: float) -> None:
    while not channel.closed:
        time.sleep(seconds)
        if time.monotonic() - channel.last_sent_at >= seconds:
            channel.send(Heartbeat())
