"""Reads a Perfetto trace with the published schema, and refuses what Perfetto would drop or draw wrongly.

`trace_processor` would be the better judge, but the package `perfetto` downloads it when it is first used; only the
schema comes with the package.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

CLEARED, NEEDED = 1, 2


@dataclass(frozen=True)
class Slice:
    path: tuple[str, ...]
    """Names of the track and of those above it, from the top."""
    track: int
    name: str
    start: int
    end: int
    depth: int
    colour: str
    arguments: dict[str, Any] = field(hash=False)

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass
class TraceFile:
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    counters: dict[tuple[str, ...], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)

    def on(self, *path: str) -> list[Slice]:
        """The slices on all tracks whose path, below that of the run, is this."""
        return [one for one in self.slices if one.path[1:] == path]


def read_trace(path: Path) -> TraceFile:
    data = path.read_bytes()
    trace = schema.Trace()
    trace.ParseFromString(gzip.decompress(data) if path.suffix == ".gz" else data)
    _known(trace)
    return _Reader().read(trace)


def _known(message: Any) -> None:
    """Every field is one that the schema has."""
    assert len(UnknownFieldSet(message)) == 0, message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for one in value if descriptor.is_repeated else [value]:
                _known(one)


class _Reader:
    def __init__(self) -> None:
        self.file = TraceFile()
        self.tracks: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.argument_names: dict[int, str] = {}
        self.events: dict[int, list[tuple[int, Any]]] = defaultdict(list)

    def read(self, trace: Any) -> TraceFile:
        assert trace.packet[0].sequence_flags & CLEARED, "names are interned, so the first packet must clear them"
        for number, packet in enumerate(trace.packet):
            assert packet.trusted_packet_sequence_id == 1
            assert number == 0 or packet.sequence_flags == NEEDED
            self._intern(packet.interned_data)
            if packet.HasField("track_descriptor"):
                self._track(packet.track_descriptor)
            else:
                assert packet.HasField("timestamp")
                assert packet.track_event.track_uuid in self.tracks, "an event on a track that is not described"
                self.events[packet.track_event.track_uuid].append((packet.timestamp, packet.track_event))
        begun: dict[int, Slice] = {}
        ended: dict[int, Slice] = {}
        for track, events in self.events.items():
            # Perfetto sorts by time; the order of packets decides between equal times.
            self._read_track(track, sorted(events, key=lambda it: it[0]), begun, ended)
        assert ended.keys() <= begun.keys(), "an arrow that ends and never began"
        self.file.arrows = [(begun[flow], ended[flow]) for flow in sorted(ended)]
        return self.file

    def _intern(self, data: Any) -> None:
        for table, entries in (
            (self.names, data.event_names),
            (self.argument_names, data.debug_annotation_names),
        ):
            for entry in entries:
                assert entry.iid not in table, "a name that is interned twice"
                assert entry.iid > 0
                table[entry.iid] = entry.name

    def _track(self, descriptor: Any) -> None:
        assert descriptor.uuid > 0
        assert descriptor.uuid not in self.tracks, "a track that is described twice"
        assert not descriptor.parent_uuid or descriptor.parent_uuid in self.tracks, "a parent that is not described"
        self.tracks[descriptor.uuid] = descriptor

    def _path(self, track: int) -> tuple[str, ...]:
        descriptor = self.tracks[track]
        above = self._path(descriptor.parent_uuid) if descriptor.parent_uuid else ()
        return (*above, descriptor.name)

    def _arguments(self, event: Any) -> dict[str, Any]:
        return {
            self.argument_names[one.name_iid]: getattr(one, one.WhichOneof("value")) for one in event.debug_annotations
        }

    def _read_track(
        self, track: int, events: list[tuple[int, Any]], begun: dict[int, Slice], ended: dict[int, Slice]
    ) -> None:
        path, is_counter = self._path(track), self.tracks[track].HasField("counter")
        open_: list[tuple[int, Any]] = []
        for at, event in events:
            assert is_counter == (event.type == event.TYPE_COUNTER), "only values are on the track of a counter"
            if event.type == event.TYPE_COUNTER:
                self.file.counters[path].append((at, event.double_counter_value))
            elif event.type == event.TYPE_INSTANT:
                self.file.instants.append((self.names[event.name_iid], at, self._arguments(event)))
            elif event.type == event.TYPE_SLICE_BEGIN:
                open_.append((at, event))
            else:
                assert event.type == event.TYPE_SLICE_END
                assert open_, f"a slice on {path} ends and never began"
                start, first = open_.pop()
                made = Slice(
                    path,
                    track,
                    self.names[first.name_iid],
                    start,
                    at,
                    len(open_),
                    first.correlation_id_str,
                    self._arguments(first) | self._arguments(event),
                )
                self.file.slices.append(made)
                for flow in first.flow_ids:
                    assert flow not in begun
                    begun[flow] = made
                for flow in first.terminating_flow_ids:
                    assert flow not in ended
                    ended[flow] = made
        assert not open_, f"{len(open_)} slices on {path} never end"
