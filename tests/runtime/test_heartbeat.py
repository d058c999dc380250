"""A busy worker sends heartbeats; messages of several threads arrive intact."""

from __future__ import annotations

import hashlib
import socket
import threading

from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.workers.heartbeat import start_heartbeat


def channels() -> tuple[Channel[m.FromWorker], Channel[m.FromWorker]]:
    ours, theirs = socket.socketpair()
    return Channel(ours, m.FromWorker), Channel(theirs, m.FromWorker)  # type: ignore[arg-type]


def test_a_busy_worker_sends_heartbeats() -> None:
    ours, theirs = channels()
    start_heartbeat(theirs, 0.005)
    data, beats = bytes(50 << 20), 0
    while beats < 4:
        hashlib.sha256(data)  # a call that releases the interpreter lock, as a prefill does, and takes many heartbeats
        beats += sum(isinstance(message, m.Heartbeat) for message in ours.receive())
    ours.close()
    theirs.close()


def test_several_threads_may_send() -> None:
    ours, theirs = channels()
    senders = [threading.Thread(target=_send, args=(theirs, number)) for number in range(4)]
    for sender in senders:
        sender.start()
    found: list[m.FromWorker] = []
    while len(found) < 2000:
        ours.wait(1.0)
        theirs.flush()
        found += ours.receive()  # raises if a frame is out of order
    steps = [message.step for message in found if isinstance(message, m.StepMetrics)]
    assert sorted(steps) == list(range(2000))
    for sender in senders:
        sender.join()
    ours.close()
    theirs.close()


def _send(channel: Channel[m.FromWorker], number: int) -> None:
    for step in range(number * 500, number * 500 + 500):
        channel.send(m.StepMetrics(step=step, metrics={"loss": 0.5}))
