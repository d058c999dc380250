"""Writes Perfetto traces: track events in the protobuf format of `perfetto_trace.proto`, packet by packet.

The few messages that a trace needs are encoded here, so that an export needs no protobuf package; the tests parse them
with the published schema. The format is chosen over Chrome's JSON because slices have a correlation id, which is what
ui.perfetto.dev colours them by, because tracks form a tree in a given order, and because files are smaller.

Invariants:
- memory is bounded by the number of tracks, of open slices and of different names, not by the length of the trace;
- `begin`, `end`, `instant` and `counter` are called in the order of their times; a `span` has no such order, but the
  spans of one track do not overlap, and no other slice is on their track;
- slices of a track nest: `end` closes the slice that was begun last;
- with a window, what is open when it starts begins with it, what is open when it ends ends with it, and nothing outside
  of it is written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, NamedTuple, TypeAlias

from dora_rl.core.types import Nanoseconds, Version

Arguments: TypeAlias = Mapping[str, str | int | float | bool]

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
"""All packets form one sequence, which is the scope of interned names."""
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_EXPLICIT = 3
"""Children of a track are shown by their rank."""
_BUFFER = 1 << 20
_NONE: Arguments = MappingProxyType({})


class Window(NamedTuple):
    """A part of a run, by its clock."""

    start: Nanoseconds
    end: Nanoseconds


class Slice(NamedTuple):
    """Something that lasts."""

    name: str
    version: Version | None = None
    """Slices of one version have one colour."""
    arguments: Arguments = _NONE
    flow: int | None = None
    """An arrow starts here, to the slice that ends it."""
    flow_end: int | None = None


class Track(NamedTuple):
    """A row of the trace. Siblings of the same name are shown as one row with lanes, as far as they overlap."""

    number: int


class PerfettoWriter:
    """Writes one trace."""

    def __init__(self, file: IO[bytes], window: Window) -> None:
        self._file = file
        self._window = window
        self._buffer = bytearray()
        self._tracks: list[bytes | None] = [None]
        """The descriptor of each track until it is written; the number 0 is not used."""
        self._parents: list[Track | None] = [None]
        self._names: dict[str, int] = {}
        self._argument_names: dict[str, int] = {}
        self._open: dict[Track, list[Slice]] = {}
        """Slices that have begun, the innermost last."""
        self._values: dict[Track, float] = {}
        """Values of the counters before the window starts."""
        self._started = False
        self._flags = _STATE_CLEARED | _NEEDS_STATE
        self.slices = 0
        """Number of slices written."""

    # -- tracks -----------------------------------------------------------------------------------------------

    def track(self, name: str, parent: Track | None = None, *, rank: int = 0, unit: str | None = None) -> Track:
        """A new row below `parent`; siblings are ordered by rank. With a unit it is that of a counter."""
        number = len(self._tracks)
        descriptor = _varint_field(1, number) + _text(2, name)
        if parent is not None:
            descriptor += _varint_field(5, parent.number)
        if unit is not None:
            descriptor += _message(8, _text(6, unit))
        self._tracks.append(descriptor + _varint_field(11, _EXPLICIT) + _varint_field(12, rank))
        self._parents.append(parent)
        return Track(number)

    # -- what happens, in the order of time -------------------------------------------------------------------

    def begin(self, track: Track, at: Nanoseconds, slice_: Slice) -> None:
        if self._inside(at):
            self._write_begin(track, at, slice_)
        self._open.setdefault(track, []).append(slice_)

    def end(self, track: Track, at: Nanoseconds, arguments: Arguments | None = None) -> None:
        """End the innermost open slice, with arguments that were not known when it began."""
        inside = self._inside(at)
        stack = self._open[track]
        stack.pop()
        if not stack:
            del self._open[track]
        if inside:
            self._write_end(track, at, arguments or _NONE)

    def instant(self, track: Track, at: Nanoseconds, name: str, arguments: Arguments | None = None) -> None:
        if self._inside(at):
            self._write_event(track, at, _INSTANT, Slice(name, arguments=arguments or _NONE))

    def counter(self, track: Track, at: Nanoseconds, value: float) -> None:
        if self._inside(at):
            self._write_counter(track, at, value)
        elif not self._started:
            self._values[track] = value

    def finish(self, at: Nanoseconds) -> None:
        """End all slices that are open. No slice is begun or ended, and no counter written, in order after that."""
        if self._inside(at):
            for track, stack in self._open.items():
                for _ in stack:
                    self._write_end(track, at, {"still open": True})
        self._open.clear()

    def _inside(self, at: Nanoseconds) -> bool:
        """Whether a time is in the window. The first that is: write what is open, and the values of counters."""
        assert at <= self._window.end, "the caller stops at the end of the window"
        if at < self._window.start:
            return False
        if not self._started:
            self._started = True
            for track, stack in self._open.items():
                for slice_ in stack:
                    self._write_begin(track, self._window.start, slice_)
            for track, value in self._values.items():
                self._write_counter(track, self._window.start, value)
            self._values.clear()
        return True

    # -- what happens, in any order ---------------------------------------------------------------------------

    def span(self, track: Track, start: Nanoseconds, end: Nanoseconds, slice_: Slice) -> None:
        """A whole slice, as far as it is in the window."""
        start, end = max(start, self._window.start), min(end, self._window.end)
        if start < end:
            self._write_begin(track, start, slice_)
            self._write_end(track, end, _NONE)

    def mark(self, track: Track, at: Nanoseconds, name: str, arguments: Arguments) -> None:
        """An instant, if it is in the window."""
        if self._window.start <= at <= self._window.end:
            self._write_event(track, at, _INSTANT, Slice(name, arguments=arguments))

    def sample(self, track: Track, at: Nanoseconds, value: float) -> None:
        """The value of a counter, if it is in the window."""
        if self._window.start <= at <= self._window.end:
            self._write_counter(track, at, value)

    def close(self) -> None:
        """Write what is buffered."""
        self._file.write(self._buffer)
        self._buffer.clear()

    # -- packets ----------------------------------------------------------------------------------------------

    def _write_begin(self, track: Track, at: Nanoseconds, slice_: Slice) -> None:
        self.slices += 1
        self._write_event(track, at, _BEGIN, slice_)

    def _write_end(self, track: Track, at: Nanoseconds, arguments: Arguments) -> None:
        self._write_event(track, at, _END, Slice("", arguments=arguments))

    def _write_event(self, track: Track, at: Nanoseconds, kind: int, slice_: Slice) -> None:
        self._describe(track)
        interned = b""
        event = _varint_field(9, kind) + _varint_field(11, track.number)
        if kind != _END:
            number, new = _intern(self._names, slice_.name)
            interned += _message(2, new) if new else b""
            event += _varint_field(10, number)
        for name, value in slice_.arguments.items():
            number, new = _intern(self._argument_names, name)
            interned += _message(3, new) if new else b""
            event += _message(4, _varint_field(1, number) + _value(value))
        if slice_.version is not None:
            event += _text(53, f"version {slice_.version}")
        if slice_.flow is not None:
            event += _fixed_field(47, slice_.flow)
        if slice_.flow_end is not None:
            event += _fixed_field(48, slice_.flow_end)
        self._packet(_varint_field(8, at) + _message(11, event) + (_message(12, interned) if interned else b""))

    def _write_counter(self, track: Track, at: Nanoseconds, value: float) -> None:
        self._describe(track)
        event = _varint_field(9, _COUNTER) + _varint_field(11, track.number) + _double_field(44, value)
        self._packet(_varint_field(8, at) + _message(11, event))

    def _describe(self, track: Track) -> None:
        """Write the descriptor of a track before its first event, after those of the tracks that it is below."""
        descriptor = self._tracks[track.number]
        if descriptor is None:
            return
        parent = self._parents[track.number]
        if parent is not None:
            self._describe(parent)
        self._tracks[track.number] = None
        self._packet(_message(60, descriptor))

    def _packet(self, content: bytes) -> None:
        packet = content + _varint_field(10, _SEQUENCE) + _varint_field(13, self._flags)
        self._flags = _NEEDS_STATE
        self._buffer += _message(1, packet)
        if len(self._buffer) >= _BUFFER:
            self.close()


# -- encoding ---------------------------------------------------------------------------------------------------


def _intern(numbers: dict[str, int], name: str) -> tuple[int, bytes]:
    """The number of a name, and what defines it if it is new."""
    number = numbers.get(name)
    if number is not None:
        return number, b""
    number = numbers[name] = len(numbers) + 1
    return number, _varint_field(1, number) + _text(2, name)


def _value(value: str | int | float | bool) -> bytes:
    match value:
        case bool():
            return _varint_field(2, int(value))
        case int():
            return _varint_field(4, value)
        case float():
            return _double_field(5, value)
        case _:
            return _text(6, value)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are in two's complement
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _fixed_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<Q", value)


def _double_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode("utf-8", "replace"))
