"""A process that computes gives signs of life; what several threads send arrives whole."""

from __future__ import annotations

import hashlib
import socket
import threading

from dora_rl.runtime import messages as m
from dora_rl.runtime.channel import Channel
from dora_rl.runtime.heart import beat


def channels() -> tuple[Channel[m.FromProcess], Channel[m.FromProcess]]:
    ours, theirs = socket.socketpair()
    return Channel(ours, m.FromProcess), Channel(theirs, m.FromProcess)  # type: ignore[arg-type]


def test_a_process_that_is_busy_gives_signs_of_life() -> None:
    ours, theirs = channels()
    beat(theirs, 0.005)
    data, beats = bytes(50 << 20), 0
    while beats < 4:
        hashlib.sha256(data)  # a call that lets go of the interpreter, as a prefill does, and takes many beats
        beats += sum(isinstance(message, m.Alive) for message in ours.receive())
    ours.close()
    theirs.close()


def test_threads_may_send_at_once() -> None:
    ours, theirs = channels()
    senders = [threading.Thread(target=_send, args=(theirs, number)) for number in range(4)]
    for sender in senders:
        sender.start()
    found: list[m.FromProcess] = []
    while len(found) < 2000:
        ours.wait(1.0)
        theirs.flush()
        found += ours.receive()  # raises if a frame is out of order
    steps = [message.step for message in found if isinstance(message, m.Stepped)]
    assert sorted(steps) == list(range(2000))
    for sender in senders:
        sender.join()
    ours.close()
    theirs.close()


def _send(channel: Channel[m.FromProcess], number: int) -> None:
    for step in range(number * 500, number * 500 + 500):
        channel.send(m.Stepped(step=step, metrics={"loss": 0.5}))
