"""Typed messages over a stream socket.

    frame   length, number (u32 each, little-endian), then one message in MessagePack

Invariants:
- frames are numbered from 0: a frame that arrives twice is ignored, a missing frame closes the channel with a typed
  error. So what is received is a prefix of what was sent, in order;
- any thread may send; one thread receives;
- sending never blocks: what the other side does not read yet is queued here, so a stopped process can't stop its peer;
- a frame that is too large or can't be decoded closes the channel with a typed error: nothing is guessed;
- messages are plain data; reading one executes nothing.

This is written by hand since pyzmq reconnects by itself and reports the end of a connection only through a monitor
socket, whereas here the end of the connection is the end of the process; and it has no transport over a socket pair
that a forked process inherits.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Generic, TypeVar

import msgspec

from dora_rl.core.errors import DoraError

logger = logging.getLogger(__name__)

M = TypeVar("M")
_HEAD = struct.Struct("<II")
_NUMBERS = 1 << 32
LARGEST = 1 << 30
"""Bytes of a frame. Larger data goes through shared memory; the limit bounds what a damaged length can ask for."""
_CHUNK = 1 << 18


class ChannelError(DoraError):
    """What came over a channel is not a message."""


class Channel(Generic[M]):
    """One end of a connection; `M` is the union of messages that may come in."""

    def __init__(self, link: socket.socket, incoming: type[M], peer: str = "peer") -> None:
        link.setblocking(False)
        self._link = link
        self._peer = peer
        """Name of the other side, for the log."""
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._sent = self._received = 0
        self._sending = threading.RLock()
        self.last_sent_at = time.monotonic()
        self._write_closed = False
        """The other side reads no more; what it sent before may still arrive."""
        self.closed = False
        """The other side is gone; what had arrived before can still be received."""

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def pending(self) -> bool:
        """Whether anything is queued that the other side has not read yet."""
        return bool(self._out)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or queue it until the other side reads it; on a closed channel it is discarded."""
        body = self._encoder.encode(message)
        if len(body) > LARGEST:
            raise ChannelError(f"a {type(message).__name__} of {len(body):,} bytes is too large for a channel")
        with self._sending:
            if not self.closed and not self._write_closed:
                self.last_sent_at = time.monotonic()
                self._out.append(memoryview(_HEAD.pack(len(body), self._sent) + body))
                self._sent = (self._sent + 1) % _NUMBERS
                self.flush()
        logger.debug("to %s: %s, %d bytes", self._peer, type(message).__name__, len(body))

    def flush(self) -> None:
        """Send as much of the queue as the other side takes now."""
        with self._sending:
            while self._out:
                try:
                    sent = self._link.send(self._out[0])
                except BlockingIOError:
                    return
                except OSError:
                    self._write_closed = True
                    self._out.clear()
                    return
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]

    def receive(self) -> list[M]:
        """All messages that have arrived."""
        while not self.closed:
            try:
                data = self._link.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                logger.info("the channel to %s was closed by the other side", self._peer)
            self._in += data
            if len(data) < _CHUNK:
                break
        return self._messages()

    def wait(self, seconds: float) -> bool:
        """Wait until a message may have arrived, at most this long; queued messages are sent meanwhile."""
        writers = [self._link] if self._out else []
        readable, writable, _ = select.select([self._link], writers, [], seconds)
        if writable:
            self.flush()
        return bool(readable)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._link.close()

    def _messages(self) -> list[M]:
        messages: list[M] = []
        start = 0
        while len(self._in) - start >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._in, start)
            if length > LARGEST:
                raise ChannelError(f"a frame claims a length of {length:,} bytes")
            end = start + _HEAD.size + length
            if len(self._in) < end:
                break
            if self._is_next(number):
                messages.append(self._decode(start + _HEAD.size, end))
            start = end
        del self._in[:start]
        return messages

    def _is_next(self, number: int) -> bool:
        """Whether a frame is the next one; False for one that was received before."""
        ahead = (number - self._received) % _NUMBERS
        if ahead == 0:
            self._received = (self._received + 1) % _NUMBERS
        elif ahead < _NUMBERS // 2:
            raise ChannelError(f"frame {self._received} is missing: frame {number} came in its place")
        return ahead == 0

    def _decode(self, start: int, end: int) -> M:
        try:
            message = self._decoder.decode(bytes(memoryview(self._in)[start:end]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ChannelError(f"a frame of {end - start:,} bytes is not a message: {error}") from error
        logger.debug("from %s: %s, %d bytes", self._peer, type(message).__name__, end - start)
        return message
