"""Faults of a machine: a wire that loses frames, a disk that is full for a while, a clock that jumps."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.core.events import Published
from dora_rl.ledger.ledger import connect
from dora_rl.runtime.launch.fork_server import ForkServer
from dora_rl.runtime.launch.machine import Machine
from dora_rl.runtime.transport import messages as m

_HEAD = struct.Struct("<II")


def machine(order: dict[str, Any], fork_server: Callable[[Path], ForkServer]) -> Machine:
    """The machine that an order asks for."""
    made: dict[str, Any] = {"fork_server": fork_server}
    note = Note(Path(order["folder"]) / "logs" / "faults")
    if "wire" in order:
        made["link"] = Wire(**order["wire"], note=note).link
    if "full" in order:
        full = _full(order["full"])
        made["connect"] = lambda path: FullDisk(connect(path), full, note)
    if "jumps" in order:
        made["clock"] = Clock(order["jumps"])
    return Machine(**made)


class Note:
    """Writes the faults that have really happened to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, fault: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{fault}\n")


class Clock:
    """Follows the machine's clock, but jumps: pairs of the time and the size of a jump, in seconds."""

    def __init__(self, jumps: list[tuple[float, float]]) -> None:
        self._jumps = jumps
        self._begin = time.monotonic()

    def __call__(self) -> int:
        passed = time.monotonic() - self._begin
        return time.monotonic_ns() + sum(round(by * 1e9) for at, by in self._jumps if passed >= at)


class FullDisk:
    """A connection to a disk that is full at times."""

    def __init__(self, connection: sqlite3.Connection, full: Callable[[], bool], note: Note) -> None:
        self._connection = connection
        self._note = note
        self._full = full

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        self._refuse_while_full()
        return self._connection.execute(statement, values)

    def executemany(self, statement: str, rows: Any) -> sqlite3.Cursor:
        self._refuse_while_full()
        return self._connection.executemany(statement, rows)

    def _refuse_while_full(self) -> None:
        if self._full():
            self._note("full")
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> FullDisk:
        self._connection.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._connection.__exit__(*details)


def _full(order: str | list[float]) -> Callable[[], bool]:
    """Full while a file exists, or between two times in seconds from now."""
    if isinstance(order, str):
        return Path(order).exists
    begin, end = (time.monotonic() + seconds for seconds in order)
    return lambda: begin <= time.monotonic() < end


class Wire:
    """Links whose frames go through a thread that drops, duplicates or delays a few of them."""

    def __init__(self, seed: int, faults: int, rate: float, kinds: list[str], note: Note) -> None:
        self._note = note
        self._dice = random.Random(seed)
        self._left = faults
        self._rate = rate
        self._kinds = kinds

    def link(self) -> tuple[socket.socket, socket.socket]:
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._relay, args=(source, target), daemon=True).start()
        return ours, theirs

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while frame := _frame(source):
                for one in self._mangled(frame):
                    target.sendall(one)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        target.close()

    def _mangled(self, frame: bytes) -> list[bytes]:
        if (
            "bundle" in self._kinds
            and m.KvExported.__name__.encode() in frame[:64]
            and _damage_bundle(frame, self._dice)
        ):
            self._note("bundle")
        if "unreported" in self._kinds:
            self._cut_before_report(frame)
            return [frame]
        if "unpublished" in self._kinds and Published.__name__.encode() in frame and _published(frame):
            self._note("unpublished")
            threading.Event().wait()
        if self._left <= 0 or self._dice.random() > self._rate:
            return [frame]
        self._left -= 1
        kind = self._dice.choice([kind for kind in self._kinds if kind != "bundle"])
        self._note(kind)
        match kind:
            case "drop":
                return []
            case "double":
                return [frame, frame]
            case _:
                time.sleep(self._dice.random())
                return [frame]

    def _cut_before_report(self, frame: bytes) -> None:
        """Break the trainer's link when a checkpoint of a step is on disk and has not been reported yet."""
        message = msgspec.msgpack.decode(frame[_HEAD.size :])
        checkpoint = isinstance(message, dict) and message.get("message") == m.CheckpointWritten.__name__
        if checkpoint and self._left > 0 and not message["name"].startswith("version-00000000"):
            self._left -= 1
            self._note("unreported")
            raise OSError("cut")


def _published(frame: bytes) -> bool:
    """Whether the frame reports that the version of the first step is published."""
    message = msgspec.msgpack.decode(frame[_HEAD.size :])
    events = message.get("events", ()) if isinstance(message, dict) else ()
    return any(event.get("event") == Published.__name__ and event["version"] == 1 for event in events)


def _damage_bundle(frame: bytes, dice: random.Random) -> bool:
    """Flip a byte in the header of a KV bundle in transit."""
    path = Path(msgspec.msgpack.decode(frame[_HEAD.size :])["bundle"] or os.devnull)
    if not path.is_file():
        return False
    with path.open("r+b") as file:
        position = dice.randrange(64, 256)  # the first request's frame, behind the file's own head
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x55]))
    return True


def _frame(source: socket.socket) -> bytes:
    head = _exactly(source, _HEAD.size)
    return head + _exactly(source, _HEAD.unpack(head)[0]) if head else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
