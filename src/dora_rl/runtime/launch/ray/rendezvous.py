"""Where processes of other machines connect to their supervisor.

    process --Hello--> supervisor --Welcome--> process, then the frames of `runtime.transport.channel`

Invariants:
- nobody gets past the door without the token that was made for the one process; tokens are compared in constant time
  and each opens the door once;
- it listens on the loopback of this machine, and on the machine's address in the cluster only once a process of
  another machine has asked for it;
- whoever knocks and says nothing costs a thread for a few seconds, and at most so many at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dora_rl.core.cpu_cores import usable_cores
from dora_rl.core.errors import RunError
from dora_rl.core.types import Nanoseconds, Record

LOOPBACK = "127.0.0.1"
_HEAD = struct.Struct("<I")
_LARGEST = 4096
_PATIENCE = 10.0
"""Seconds for either side of the greeting."""
_GUESTS = 64


class Hello(Record, frozen=True, kw_only=True):
    """Who knocks."""

    token: bytes
    pid: int
    kernel: str
    """Of which machine: process ids mean something only to those of the same one."""
    node: str
    """Of the cluster."""
    cores: int
    """That this process may use."""


class Welcome(Record, frozen=True, kw_only=True):
    """Come in."""

    clock: Nanoseconds
    """What the monotonic clock of the supervisor's machine says."""
    kernel: str


def this_kernel() -> str:
    """Names the kernel and the space of process ids that this process is in."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


class Rendezvous:
    """The supervisor's end."""

    def __init__(self, let_in: Callable[[str, Hello, socket.socket], None]) -> None:
        self._let_in = let_in
        self._expected: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._guests = threading.Semaphore(_GUESTS)
        self._listeners: dict[str, socket.socket] = {}
        self.listen(LOOPBACK)

    def expect(self, name: str) -> bytes:
        """A token that opens the door once, for the process of this name."""
        token = secrets.token_bytes(32)
        with self._lock:
            self._expected[name] = token
        return token

    def forget(self, name: str) -> None:
        with self._lock:
            self._expected.pop(name, None)

    def listen(self, address: str) -> int:
        """The port at an address of this machine."""
        with self._lock:
            if address not in self._listeners:
                listener = socket.create_server((address, 0), backlog=128)
                self._listeners[address] = listener
                threading.Thread(target=self._serve, args=(listener,), daemon=True, name=f"door {address}").start()
            return int(self._listeners[address].getsockname()[1])

    def close(self) -> None:
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            if self._guests.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(link,), daemon=True).start()
            else:
                link.close()

    def _greet(self, link: socket.socket) -> None:
        try:
            prepare(link)
            hello = msgspec.msgpack.decode(_receive(link), type=Hello)
            name = self._whose(hello.token)
            if name is None:
                link.close()
                return
            _send(link, Welcome(clock=time.monotonic_ns(), kernel=this_kernel()))
            self._let_in(name, hello, link)
        except (OSError, ValueError, msgspec.DecodeError):
            link.close()
        finally:
            self._guests.release()

    def _whose(self, token: bytes) -> str | None:
        with self._lock:
            found = [name for name, one in self._expected.items() if hmac.compare_digest(one, token)]
            return found[0] if found and self._expected.pop(found[0]) else None


def enter(address: str, port: int, token: bytes, node: str) -> tuple[socket.socket, Nanoseconds]:
    """The process's end: a link, and how much later it is here by the machine's clock."""
    link = socket.create_connection((address, port), timeout=_PATIENCE)
    kernel = this_kernel()
    try:
        prepare(link)
        _send(link, Hello(token=token, pid=os.getpid(), kernel=kernel, node=node, cores=usable_cores()))
        welcome = msgspec.msgpack.decode(_receive(link), type=Welcome)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        link.close()
        raise RunError(f"the supervisor at {address}:{port} did not let this process in: {error}") from error
    return link, 0 if welcome.kernel == kernel else time.monotonic_ns() - welcome.clock


def prepare(link: socket.socket) -> None:
    """Small messages go at once; a machine that vanished is noticed by the system too."""
    link.settimeout(_PATIENCE)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(link: socket.socket, record: Record) -> None:
    body = msgspec.msgpack.encode(record)
    link.sendall(_HEAD.pack(len(body)) + body)


def _receive(link: socket.socket) -> bytes:
    (size,) = _HEAD.unpack(_exactly(link, _HEAD.size))
    if size > _LARGEST:
        raise ValueError(f"a greeting of {size:,} bytes")
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ValueError("the other side hung up")
        data += part
    return data
