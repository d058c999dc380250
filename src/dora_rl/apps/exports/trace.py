"""A run, or a part of it, as a Perfetto trace: what `dora-rl export RUN --to trace FILE` writes.

Tracks, below one for the run:

    versions      each version from its publication until its weights are freed
    steps         each step, from the publication before it to its own, with its metrics
    trainer       how the trainer spent its time: training, publishing, or idle with the cause
    faults        lost processes, failed loads, moves, trajectories and groups
    counters      live versions, requests, untrained groups, staleness and its bound, tokens/s, reward
    i0, i1, ...   an instance, across its restarts: KV tokens in use, and for each slot
        i0/0          how it spent its time, by version; idle time with its cause
        weights       which version it serves or loads
        requests      each request while it is on the slot; arrows show moves

Time by activity comes from `activity.jsonl`, in windows of half a second (`apps.segments`), so its sums are those of
the report. Everything else comes from the event log and has the times of its events.

Invariant: memory is bounded by what is live at a time and by the number of steps, not by the length of the run.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dora_rl.apps import run_reader
from dora_rl.apps.event_log import last_time, read_log
from dora_rl.apps.exports.perfetto import Arguments, PerfettoWriter, Slice, Track, Window
from dora_rl.apps.exports.tracks import ActivityLanes, InstanceTracks, Lanes, SlotTracks
from dora_rl.apps.log_state import LogObserver, LogState, Request, Slot
from dora_rl.apps.run_reader import open_ledger
from dora_rl.apps.segments import slot_id
from dora_rl.apps.summary import REWARD, worker_id
from dora_rl.core.errors import UserError
from dora_rl.core.types import SECOND, InstanceId, Nanoseconds, SlotId, StepId, TrajectoryId, Version
from dora_rl.orchestrator.modes import MODES
from dora_rl.runtime.run_dir import RunDir

_SAMPLES = 4000
"""Most samples of a counter that changes all the time: the width of a few screens."""
_FINEST = SECOND // 2
_TAIL_BYTES = 1 << 18
"""Windows are written in the order of their ends, except for those of the last second or so."""
_RANKS = ("versions", "steps", "trainer", "faults")
_COUNTERS = {
    "live versions": "versions",
    "requests": "requests",
    "waiting requests": "requests",
    "untrained groups": "groups",
    "staleness of the step": "steps",
    "staleness bound": "steps",
    "generated tokens/s": "tokens/s",
    "trained tokens/s": "tokens/s",
    "reward": "reward",
}


class Written(NamedTuple):
    """What was written."""

    window: Window
    slices: int


def write_trace(folder: RunDir, file: Path, start: float | None = None, end: float | None = None) -> Written:
    """Write the trace of a run, or of the part between two times in seconds, to a file; `.gz` is compressed."""
    with open_ledger(folder) as connection:
        whole = Window(0, max(last_time(connection), _last_window(folder)))
        window = _part(whole, start, end)
        staged = file.with_name(f".{file.name}.staged")
        try:
            with _open(staged, compressed=file.suffix == ".gz") as output:
                writer = PerfettoWriter(output, window)
                tracks = RunTracks(writer, folder, window)
                state = LogState(folder.settings()["control"]["group_size"], tracks)
                for one in read_log(connection):
                    if one.at > window.end:
                        break
                    state.apply(one.event, one.commands, one.at)
                writer.finish(min(whole.end, window.end))
                tracks.add_activity(folder)
                writer.close()
            staged.rename(file)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error
        finally:
            staged.unlink(missing_ok=True)
    return Written(window, writer.slices)


def _open(file: Path, *, compressed: bool) -> IO[bytes]:
    # Traces are repetitive: a higher level takes longer and saves little.
    return gzip.open(file, "wb", compresslevel=3) if compressed else file.open("wb")  # type: ignore[return-value]


def _last_window(folder: RunDir) -> Nanoseconds:
    """The end of the last activity window, from the last lines of the file."""
    try:
        with folder.activity.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            ends = [run_reader.parse(line) for line in file]
    except OSError:
        return 0
    return max((record["end"] for record in ends if isinstance(record, dict) and "end" in record), default=0)


def _part(whole: Window, start: float | None, end: float | None) -> Window:
    first = whole.start if start is None else round(start * SECOND)
    last = whole.end if end is None else min(round(end * SECOND), whole.end)
    if first >= last:
        raise UserError(f"nothing happened in that window: the run lasted {whole.end / SECOND:.1f} s")
    return Window(first, last)


class RunTracks(LogObserver):
    """Writes what the event log and the files of a run say as tracks."""

    def __init__(self, writer: PerfettoWriter, folder: RunDir, window: Window) -> None:
        self._writer = writer
        self._run = writer.track(f"run {folder.path.resolve().name}")
        self._versions = Lanes(writer, "versions", self._run, _RANKS.index("versions"))
        self._steps = writer.track("steps", self._run, rank=_RANKS.index("steps"))
        self._trainer = ActivityLanes(writer, self._run, "trainer", _RANKS.index("trainer"))
        self._faults = writer.track("faults", self._run, rank=_RANKS.index("faults"))
        self._counters = {
            name: writer.track(name, self._run, rank=len(_RANKS) + rank, unit=unit)
            for rank, (name, unit) in enumerate(_COUNTERS.items())
        }
        self._instances: dict[str, InstanceTracks] = {}
        self._metrics = run_reader.read_metrics(folder).steps
        self._counts: dict[str, int] = {}
        """The last values of counters that are written when they change."""
        self._interval = max(_FINEST, (window.end - window.start) // _SAMPLES)
        self._step: StepId | None = None
        """The step that has begun."""
        self._live: dict[Version, Track] = {}
        self._serving: dict[SlotId, Track] = {}
        """Tracks on which a slot has a slice open."""
        self._requests: dict[TrajectoryId, Track] = {}
        self._inner: dict[TrajectoryId, str] = {}
        """The slice that is open inside that of a request."""
        self._flows: dict[TrajectoryId, int] = {}
        """Arrows that have begun."""
        self._moves = 0
        self._bin: Nanoseconds = 0
        """Start of the interval over which tokens are counted."""
        self._tokens = 0
        self._lost: set[InstanceId] = set()
        control = folder.settings()["control"]
        self._last_step: int | None = control["steps"]
        self.bound_changed(MODES[control["mode"]].staleness(control["max_staleness"]), 0)

    # -- requests ---------------------------------------------------------------------------------------------

    def request_began(self, request: Request, at: Nanoseconds) -> None:
        track = self._requests[request.trajectory] = self._slot(request.slot).requests.take()
        arguments: dict[str, int] = {"trajectory": request.trajectory, "group": request.group}
        if request.attempt:
            arguments["attempt"] = request.attempt
        flow = self._flows.pop(request.trajectory, None)
        self._writer.begin(track, at, Slice(f"v{request.version}", request.version, arguments, flow_end=flow))
        self._set_inner(request, at)

    def request_ended(self, request: Request, at: Nanoseconds, outcome: str) -> None:
        track = self._requests.pop(request.trajectory)
        if self._inner.pop(request.trajectory, None) is not None:
            self._writer.end(track, at)
        if not outcome.startswith("moved"):
            self._flows.pop(request.trajectory, None)
        self._writer.end(track, at, {"outcome": outcome, "response tokens": request.tokens})
        self._slot(request.slot).requests.release(track)

    def request_waits(self, request: Request, at: Nanoseconds) -> None:
        self._set_inner(request, at)

    def _set_inner(self, request: Request, at: Nanoseconds) -> None:
        """While a request moves or waits for its environment, a slice inside its own says so."""
        key, track = request.trajectory, self._requests[request.trajectory]
        wanted = f"move to {request.target}" if request.target else "waits for its environment" * request.parked
        if self._inner.get(key, "") == wanted:
            return
        if self._inner.pop(key, None) is not None:
            self._writer.end(track, at)
            self._flows.pop(key, None)
        if not wanted:
            return
        self._inner[key] = wanted
        flow = None
        if request.target:
            self._moves += 1
            flow = self._flows[key] = self._moves
        self._writer.begin(track, at, Slice(wanted, flow=flow))

    # -- slots and versions -----------------------------------------------------------------------------------

    def slot_changed(self, slot: SlotId, state: Slot, at: Nanoseconds) -> None:
        self.slot_gone(slot, at)
        version = state.version if state.loading is None else state.loading
        if version is not None:
            name = f"v{version}" if state.loading is None else f"load v{version}"
            track = self._serving[slot] = self._slot(slot).weights.take()
            self._writer.begin(track, at, Slice(name, version))

    def slot_gone(self, slot: SlotId, at: Nanoseconds) -> None:
        track = self._serving.pop(slot, None)
        if track is not None:
            self._writer.end(track, at)
            self._slot(slot).weights.release(track)

    def published(self, version: Version, at: Nanoseconds) -> None:
        track = self._live[version] = self._versions.take()
        self._writer.begin(track, at, Slice(f"v{version}", version))
        if self._step is not None:
            self._writer.end(self._steps, at, self._arguments(self._step))
            self._sample_metrics(self._step, at)
        self._step = None if version == self._last_step else version
        if self._step is not None:
            self._writer.begin(self._steps, at, Slice(f"step {version}", version))

    def retired(self, version: Version, at: Nanoseconds) -> None:
        track = self._live.pop(version)
        self._writer.end(track, at)
        self._versions.release(track)

    def _arguments(self, step: StepId) -> Arguments:
        return {name: value for name, value in self._metrics.get(step, {}).items() if isinstance(value, int | float)}

    def _sample_metrics(self, step: StepId, at: Nanoseconds) -> None:
        found = self._metrics.get(step, {})
        for counter, metric in (("trained tokens/s", "throughput/tokens_per_second"), ("reward", REWARD)):
            if metric in found and math.isfinite(found[metric]):
                self._writer.sample(self._counters[counter], at, found[metric])

    # -- counters and faults ----------------------------------------------------------------------------------

    def counts_changed(self, state: LogState, at: Nanoseconds) -> None:
        counts = {
            "live versions": len(state.running),
            "requests": state.running.total(),
            "waiting requests": state.waiting.total(),
            "untrained groups": len(state.untrained),
        }
        for name, count in counts.items():
            if self._counts.get(name) != count:
                self._counts[name] = count
                self._writer.counter(self._counters[name], at, count)

    def step_applied(self, step: StepId, staleness: Sequence[int], at: Nanoseconds) -> None:  # noqa: ARG002
        self._writer.counter(self._counters["staleness of the step"], at, sum(staleness) / max(1, len(staleness)))

    def bound_changed(self, bound: int, at: Nanoseconds) -> None:
        self._writer.counter(self._counters["staleness bound"], at, bound)

    def tokens_generated(self, count: int, at: Nanoseconds) -> None:
        while at >= self._bin + self._interval:
            self._sample_tokens()
            # One zero is enough for a long pause.
            self._bin = max(self._bin + self._interval, at - at % self._interval - self._interval)
        self._tokens += count

    def _sample_tokens(self) -> None:
        rate = self._tokens * SECOND / self._interval
        self._writer.sample(self._counters["generated tokens/s"], self._bin, rate)
        self._tokens = 0

    def kv_tokens(self, instance: InstanceId, count: int, at: Nanoseconds) -> None:
        tracks = self._instance(instance)
        if tracks.kv_at is None or at >= tracks.kv_at + self._interval:
            tracks.kv_at = at
            self._writer.sample(tracks.kv, at, count)

    def fault(self, kind: str, what: str, reason: str, at: Nanoseconds) -> None:
        if kind == "instance lost":
            self._lost.add(what)
        self._writer.instant(self._faults, at, kind, _fault_arguments(what, reason))

    # -- activity ---------------------------------------------------------------------------------------------

    def add_activity(self, folder: RunDir) -> None:
        """Write how the time of slots and trainer was spent, after the event log."""
        self._sample_tokens()
        for record in run_reader.lines(folder.activity):
            if "note" in record:
                self._note(record)
            else:
                window = run_reader.Window(record["who"], record["start"], record["end"], record["shares"])
                slot = slot_id(window.who)
                lanes = self._trainer if window.who == "trainer" else self._slot(slot).activity
                lanes.add(window)
        self._trainer.close()
        for instance in self._instances.values():
            instance.close()

    def _note(self, note: dict[str, Any]) -> None:
        """Processes that the event log does not mention, such as reward workers, and log-prob gaps."""
        at, who = note["at"], str(note.get("who", ""))
        if note["note"] == "lost" and who not in self._lost and worker_id(who) != "trainer":
            self._writer.mark(self._faults, at, "process lost", _fault_arguments(who, str(note["reason"])))
        elif note["note"] == "mismatch":
            reason = f"log-probs of engine and trainer differ by {note['gap']:.1e} per token"
            self._writer.mark(self._faults, at, "log-prob gap", _fault_arguments(f"step {note['step']}", reason))

    def _instance(self, instance: InstanceId) -> InstanceTracks:
        name = worker_id(instance)
        if name not in self._instances:
            self._instances[name] = InstanceTracks(self._writer, self._run, name)
        return self._instances[name]

    def _slot(self, slot: SlotId | None) -> SlotTracks:
        assert slot is not None
        return self._instance(slot.instance).slot(slot.number)


def _fault_arguments(what: str, reason: str) -> Arguments:
    return {"what": what, "reason": reason} if reason else {"what": what}
