"""Typed messages over a stream socket.

    frame   length, number (u32 each, little-endian), then one message in MessagePack

Invariants:
- frames are numbered from 0: one that comes twice is ignored, one that is missing closes the channel with a typed
  error, so what is received is what was sent, in order and up to a point;
- any thread may send; one thread receives;
- sending never blocks: what the other side does not take yet waits here, so a stopped process can't stop its peer;
- a frame that is too large or can't be decoded closes the channel with a typed error: nothing is guessed;
- messages are plain data; reading one executes nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Generic, TypeVar

import msgspec

from dora_rl.core.errors import DoraError

M = TypeVar("M")
_HEAD = struct.Struct("<II")
_NUMBERS = 1 << 32
LARGEST = 1 << 30
"""Bytes of a frame. Larger things go through shared memory; this only bounds what a damaged length can ask for."""
_CHUNK = 1 << 18


class ChannelError(DoraError):
    """What came over a channel is not a message."""


class Channel(Generic[M]):
    """One end of a connection; `M` is the union of messages that may come in."""

    def __init__(self, link: socket.socket, incoming: type[M]) -> None:
        link.setblocking(False)
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._sent = self._received = 0
        self._sending = threading.RLock()
        self.spoke = time.monotonic()
        """When something was last sent."""
        self._deaf = False
        """The other side takes nothing any more; what it said before may still be on its way."""
        self.closed = False
        """The other side is gone; what had arrived before can still be received."""

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def pending(self) -> bool:
        """There is something that the other side has not taken yet."""
        return bool(self._out)

    def send(self, message: msgspec.Struct) -> None:
        """Send, or keep until the other side takes it; to a closed channel nothing is sent."""
        body = self._encoder.encode(message)
        if len(body) > LARGEST:
            raise ChannelError(f"a {type(message).__name__} of {len(body):,} bytes is too large for a channel")
        with self._sending:
            if not self.closed and not self._deaf:
                self.spoke = time.monotonic()
                self._out.append(memoryview(_HEAD.pack(len(body), self._sent) + body))
                self._sent = (self._sent + 1) % _NUMBERS
                self.flush()

    def flush(self) -> None:
        """Hand over as much as the other side takes now."""
        with self._sending:
            while self._out:
                try:
                    sent = self._link.send(self._out[0])
                except BlockingIOError:
                    return
                except OSError:
                    self._deaf = True
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
            self._in += data
            if len(data) < _CHUNK:
                break
        return self._messages()

    def wait(self, seconds: float) -> bool:
        """Until a message may have come, at most so long; keeps sending meanwhile."""
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
                raise ChannelError(f"a frame says that it has {length:,} bytes")
            end = start + _HEAD.size + length
            if len(self._in) < end:
                break
            if self._is_next(number):
                messages.append(self._decode(start + _HEAD.size, end))
            start = end
        del self._in[:start]
        return messages

    def _is_next(self, number: int) -> bool:
        """False for a frame that was there before."""
        ahead = (number - self._received) % _NUMBERS
        if ahead == 0:
            self._received = (self._received + 1) % _NUMBERS
        elif ahead < _NUMBERS // 2:
            raise ChannelError(f"frame {self._received} is missing: frame {number} came in its place")
        return ahead == 0

    def _decode(self, start: int, end: int) -> M:
        try:
            return self._decoder.decode(bytes(memoryview(self._in)[start:end]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ChannelError(f"a frame of {end - start:,} bytes is not a message: {error}") from error
