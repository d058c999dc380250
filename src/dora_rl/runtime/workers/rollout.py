"""The rollout worker: one instance, which is an engine in its own process, driven by messages.

    messages -> engine between steps -> engine.step() -> reports

Invariants:
- sampled tokens are reported before what follows from them: before `Generated`, and before a KV bundle;
- a request that can't be served fails its trajectory, and the others continue;
- every moment of each slot is reported once, in windows whose shares add up to the length of the window.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time

import msgspec
import numpy as np
import torch

from dora_rl.core import commands as c
from dora_rl.core.errors import PromptError, RequestError
from dora_rl.core.events import AnyEvent, Parked, SlotLoaded, TrajectoryFailed
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Nanoseconds
from dora_rl.engine.requests import FinishReason, StepOutput
from dora_rl.runtime.run_dir import parse
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.data_plane import DataPlane
from dora_rl.runtime.workers import thread_spinning
from dora_rl.runtime.workers.engine_factory import make_engine
from dora_rl.runtime.workers.heartbeat import start_heartbeat

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 0.03
"""How long tokens are collected for one report when no event is waiting to be sent."""
_LOAD_POLL_SECONDS = 0.002
"""Time between two checks of a slot that is loading."""


class RolloutWorker:
    """Serves one instance."""

    def __init__(self, start: m.StartWorker, channel: Channel[m.ToWorker], data_plane: DataPlane) -> None:
        os.nice(start.niceness)
        torch.set_num_threads(start.threads)
        thread_spinning.watch()
        config = parse(start.config)
        self._channel = channel
        self._data_plane = data_plane
        self._origin = start.origin
        self._mixes = config.control.mode_spec.mixes_versions
        self._heartbeat = config.rollout.heartbeat_seconds
        self._threads = config.rollout.engine.threads
        """If set, the supervisor's thread allocation is ignored."""
        weights = data_plane.weights(start, config)
        self._engine = make_engine(config, weights, start.name, start.threads, self._now)
        self._chunks: list[TokenChunk] = []
        self._ended: list[m.ResponseEnded] = []
        self._events: list[AnyEvent] = []
        self._last_report_at = time.monotonic()
        self._last_progress_at = 0.0
        self._load_started_at: dict[int, float] = {}
        """For each slot that is loading."""
        self._window_starts = [account.created for account in self._engine.accounts]

    def serve(self, messages: list[m.ToWorker]) -> None:
        """Serve until the supervisor says stop or is gone."""
        self._channel.send(m.RolloutReady(spec=self._engine.spec(), kernels=self._engine.kernels))
        start_heartbeat(self._channel, self._heartbeat)
        while True:
            for message in messages:
                if isinstance(message, m.StopWorker):
                    self._send(force=True)
                    return
                self._handle(message)
            if self._channel.closed:
                return
            self._work()
            self._send()
            messages = self._channel.receive()

    def _work(self) -> None:
        engine = self._engine
        if engine.running or engine.busy:
            output = engine.step()
            self._take(output)
            if engine.running or output.events:
                return
            seconds = _LOAD_POLL_SECONDS
        else:
            seconds = max(0.0, self._last_progress_at + self._heartbeat - time.monotonic())
        if self._chunks or self._ended or self._events:
            self._send(force=True)
        self._channel.wait(seconds)

    # -- incoming messages ------------------------------------------------------------------------------------

    def _handle(self, message: m.ToWorker) -> None:
        match message:
            case m.RunCommand(command=command):
                self._execute(command)
            case m.SubmitRequests():
                self._submit(message)
            case m.ExportKv():
                self._export(message)
            case m.ImportKv():
                self._import(message)
            case m.ExtendRequest() | m.EndRequest():
                self._continue(message)
            case m.SetThreads(count=count):
                self._engine.set_threads(self._threads or count)
            case _:
                raise AssertionError(f"not a message for a rollout worker: {message}")

    def _execute(self, command: c.AnyCommand) -> None:
        match command:
            case c.LoadVersion():
                self._load_started_at[command.slot.number] = time.monotonic()
                self._engine.load(command.slot.number, command.version, in_flight=command.in_flight)
            case c.UnloadSlot():
                self._engine.unload(command.slot.number)
            case c.Abort():
                self._engine.abort(command.trajectory, command.attempt)
            case c.SlotIdles():
                self._engine.note_idle(command.slot.number, command.cause)
            case _:
                raise AssertionError(f"not a command for a rollout worker: {command}")

    def _submit(self, message: m.SubmitRequests) -> None:
        version = self._engine.serving(message.slot)
        for request in message.requests:
            try:
                # In mode `partial` a request runs under the version that its slot serves now.
                mixed = self._mixes and version is not None and version != request.version
                self._engine.submit(
                    msgspec.structs.replace(request, version=version) if mixed else request, message.slot
                )
            except RequestError as error:
                self._events.append(TrajectoryFailed(trajectory=request.trajectory, reason=str(error)))

    def _export(self, message: m.ExportKv) -> None:
        here = [
            (trajectory, attempt)
            for trajectory, attempt in zip(message.trajectories, message.attempts, strict=True)
            if self._engine.has(trajectory, attempt)
        ]
        name, problem = "", ""
        if here:
            try:
                name = self._data_plane.export(self._engine, [trajectory for trajectory, _ in here])
            except RequestError as error:
                problem = str(error)  # no room for a bundle: the requests stay and continue here
                logger.warning("move %d: no KV exported: %s", message.move, error)
        self._take(self._engine.drain())
        self._send(force=True)
        trajectories, attempts = tuple(t for t, _ in here), tuple(a for _, a in here)
        self._channel.send(
            m.KvExported(move=message.move, bundle=name, trajectories=trajectories, attempts=attempts, problem=problem)
        )

    def _import(self, message: m.ImportKv) -> None:
        try:
            arrived, errors = self._engine.import_(self._data_plane.fetch(message.bundle), message.slot)
            problems = tuple(str(error) for error in errors)
        except RequestError as error:
            arrived, problems = (), (str(error),)
        self._channel.send(m.KvImported(move=message.move, arrived=arrived, problems=problems))

    def _continue(self, message: m.ExtendRequest | m.EndRequest) -> None:
        try:
            if isinstance(message, m.EndRequest):
                self._engine.end(message.trajectory, message.attempt)
                self._take(self._engine.drain())
            else:
                tokens = np.frombuffer(message.tokens, dtype=np.int32).tolist()
                self._engine.extend(message.trajectory, message.attempt, tokens)
        except PromptError as error:
            self._engine.abort(message.trajectory, message.attempt)
            self._events.append(TrajectoryFailed(trajectory=message.trajectory, reason=str(error)))
        except RequestError:
            self._channel.send(m.NotParked(trajectory=message.trajectory, attempt=message.attempt))

    # -- outgoing reports -------------------------------------------------------------------------------------

    def _take(self, output: StepOutput) -> None:
        self._chunks += [chunk.for_training() for chunk in output.chunks]
        parked = {event.trajectory for event in output.events if isinstance(event, Parked)}
        for finished in output.finished:
            if finished.reason is not FinishReason.FAILED and finished.trajectory not in parked:
                reason = "stop" if finished.reason is FinishReason.STOP else "length"
                self._ended.append(
                    m.ResponseEnded(trajectory=finished.trajectory, attempt=finished.attempt, reason=reason)  # type: ignore[arg-type]
                )
        for event in output.events:
            if isinstance(event, SlotLoaded):
                self._log_loaded(event)
        self._events += output.events

    def _log_loaded(self, event: SlotLoaded) -> None:
        seconds = time.monotonic() - self._load_started_at.pop(event.slot.number, time.monotonic())
        logger.info("slot %d: loaded version %d in %.3f s", event.slot.number, event.version, seconds)

    def _send(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if now >= self._last_progress_at + self._heartbeat:
            self._last_progress_at = now
            self._events.append(self._engine.progress())
            self._account()
            force = True
        if not (self._chunks or self._ended or self._events):
            return
        if force or self._events or now >= self._last_report_at + _REPORT_SECONDS:
            self._last_report_at = now
            report = m.RolloutReport(chunks=tuple(self._chunks), ended=tuple(self._ended), events=tuple(self._events))
            self._chunks, self._ended, self._events = [], [], []
            self._channel.send(report)

    def _account(self) -> None:
        """Report what the slots' time since the last report was spent on."""
        now = self._now()
        for slot, account in enumerate(self._engine.accounts):
            shares = m.TimeShare.take(account, now)
            self._channel.send(m.SlotTime(slot=slot, start=self._window_starts[slot], end=now, shares=shares))
            self._window_starts[slot] = now
        self._channel.send(m.EngineStats(figures=dataclasses.asdict(self._engine.stats)))

    def _now(self) -> Nanoseconds:
        return time.monotonic_ns() - self._origin
