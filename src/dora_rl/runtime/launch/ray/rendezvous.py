"""Where workers on other machines connect to their supervisor.

    worker --Hello--> supervisor --Welcome--> worker, then the frames of `runtime.transport.channel`

Invariants:
- a connection is accepted only with the token that was made for that one worker; tokens are compared in constant time,
  and each is valid once;
- the supervisor listens on the loopback address, and on the machine's address in the cluster only once a worker of
  another machine has asked for it;
- a connection that sends nothing costs a thread for a few seconds, and the number of such connections is limited.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
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

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_HEAD = struct.Struct("<I")
_LARGEST = 4096
_HANDSHAKE_SECONDS = 10.0
"""Time for either side of the handshake."""
_MAX_HANDSHAKES = 64


class Hello(Record, frozen=True, kw_only=True):
    """Sent by a worker that connects."""

    token: bytes
    pid: int
    kernel: str
    """Names the worker's kernel: process ids are valid only within one."""
    node: str
    """Ray's id of the worker's node."""
    cores: int
    """Cores that the worker may use."""


class Welcome(Record, frozen=True, kw_only=True):
    """The supervisor's answer to a valid token."""

    clock: Nanoseconds
    """The monotonic clock of the supervisor's machine."""
    kernel: str


def this_kernel() -> str:
    """Names the kernel and the process id namespace of this process."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        names.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.blake2b("|".join(names).encode(), digest_size=16).hexdigest()


class Rendezvous:
    """The supervisor's side; `on_connect` is called from a thread with the worker's name, its `Hello` and the link."""

    def __init__(self, on_connect: Callable[[str, Hello, socket.socket], None]) -> None:
        self._on_connect = on_connect
        self._tokens: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self._listeners: dict[str, socket.socket] = {}
        self.listen(LOOPBACK)

    def expect(self, name: str) -> bytes:
        """Make a token that lets the worker of this name connect once."""
        token = secrets.token_bytes(32)
        with self._lock:
            self._tokens[name] = token
        return token

    def forget(self, name: str) -> None:
        """Revoke the token of a worker."""
        with self._lock:
            self._tokens.pop(name, None)

    def listen(self, address: str) -> int:
        """The port at an address of this machine."""
        with self._lock:
            if address not in self._listeners:
                listener = socket.create_server((address, 0), backlog=128)
                self._listeners[address] = listener
                name = f"rendezvous {address}"
                threading.Thread(target=self._accept, args=(listener,), daemon=True, name=name).start()
                logger.info("listening for workers on %s:%d", *listener.getsockname()[:2])
            return int(self._listeners[address].getsockname()[1])

    def close(self) -> None:
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._handshake, args=(link,), daemon=True).start()
            else:
                logger.warning("refused a connection: %d handshakes are under way", _MAX_HANDSHAKES)
                link.close()

    def _handshake(self, link: socket.socket) -> None:
        try:
            configure_link(link)
            hello = msgspec.msgpack.decode(_receive(link), type=Hello)
            name = self._redeem(hello.token)
            if name is None:
                logger.warning("refused a connection without a valid token")
                link.close()
                return
            _send(link, Welcome(clock=time.monotonic_ns(), kernel=this_kernel()))
            self._on_connect(name, hello, link)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.warning("a handshake failed: %s", error)
            link.close()
        finally:
            self._handshakes.release()

    def _redeem(self, token: bytes) -> str | None:
        """The name of the worker whose token this is; the token is not valid any more."""
        with self._lock:
            names = [name for name, one in self._tokens.items() if hmac.compare_digest(one, token)]
            return names[0] if names and self._tokens.pop(names[0]) else None


def connect(address: str, port: int, token: bytes, node: str) -> tuple[socket.socket, Nanoseconds]:
    """The worker's side: a link to the supervisor, and by how much the clock of this machine is ahead of its clock."""
    link = socket.create_connection((address, port), timeout=_HANDSHAKE_SECONDS)
    kernel = this_kernel()
    try:
        configure_link(link)
        _send(link, Hello(token=token, pid=os.getpid(), kernel=kernel, node=node, cores=usable_cores()))
        welcome = msgspec.msgpack.decode(_receive(link), type=Welcome)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        link.close()
        raise RunError(f"the supervisor at {address}:{port} did not accept this worker: {error}") from error
    return link, 0 if welcome.kernel == kernel else time.monotonic_ns() - welcome.clock


def configure_link(link: socket.socket) -> None:
    """Send small messages at once, and let the operating system notice a machine that has vanished."""
    link.settimeout(_HANDSHAKE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(link: socket.socket, record: Record) -> None:
    body = msgspec.msgpack.encode(record)
    link.sendall(_HEAD.pack(len(body)) + body)


def _receive(link: socket.socket) -> bytes:
    (size,) = _HEAD.unpack(_exactly(link, _HEAD.size))
    if size > _LARGEST:
        raise ValueError(f"a handshake message of {size:,} bytes is too large")
    return _exactly(link, size)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ValueError("the other side closed the connection")
        data += part
    return data
