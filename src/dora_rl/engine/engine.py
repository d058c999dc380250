"""The built-in rollout engine: continuous batching over slots of versioned weights, in one thread.

    submit, load, abort, export, import_      between steps
    step()                                    plan -> one forward pass per busy slot -> sample -> report

Invariants:
- all tokens of a request come from the version in its slot; each is reported once, in order, with that version
  (mode `partial` changes the version under a running request, and then the reports carry the new one);
- the tokens of a request do not depend on what else runs: its random numbers are keyed by (seed, trajectory, position),
  and with the compiled kernels its logits are the same to the last bit in any batch;
- a request that can't be served is refused with a typed error, which affects no other request;
- when nothing is running, waiting or swapped, every block is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dora_rl.core.activities import ActivityLabel, IdleCause
from dora_rl.core.errors import (
    BundleError,
    MemoryCapError,
    ProbeError,
    PromptError,
    RequestError,
    SlotError,
    VersionError,
)
from dora_rl.core.events import KvPressure, Progress, SlotLoaded, SlotLoadFailed
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import Attempt, InstanceId, InstanceSpec, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.engine.batch import DecodeBatch
from dora_rl.engine.kernel_choice import choose_runner
from dora_rl.engine.kv import KvCache
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.kv_transfer.pack import pack, unpack
from dora_rl.engine.kv_transfer.shared_memory import SegmentPool
from dora_rl.engine.probe import Prober
from dora_rl.engine.reports import Reports
from dora_rl.engine.request_checks import check_request, contains_stop, stop_window
from dora_rl.engine.requests import FinishReason, Request, StepOutput
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import Sequence
from dora_rl.engine.slot_accounting import account_migration, account_step
from dora_rl.engine.slots import STARTING, EngineSlot, Loading
from dora_rl.engine.stats import Stats
from dora_rl.engine.step_execution import StepExecutor
from dora_rl.models.text import model_context

if TYPE_CHECKING:
    from dora_rl.core.interfaces import WeightSource
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.runner import MakeRunner

Clock = Callable[[], Nanoseconds]


class Engine:
    """One rollout engine. It is not thread-safe: one thread calls it."""

    def __init__(
        self,
        model: Any,
        weights: WeightSource,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        instance: InstanceId = "engine",
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self.config = config
        self.instance = instance
        self._tokenizer = tokenizer
        self._weights = weights
        self._clock = clock
        self.context = min(config.max_context, model_context(model.config) or config.max_context)
        self.vocab: int = model.get_input_embeddings().weight.shape[0]
        self.threads = config.threads or torch.get_num_threads()
        choice = choose_runner(model, config, self.context)
        shape, self.kernels = choice.shape, choice.name
        self._cache = KvCache(shape, config.kv_bytes, model.device)
        if self._cache.count < 2:
            raise MemoryCapError(f"kv_bytes is {config.kv_bytes:,}; two blocks take {2 * shape.block_bytes:,} bytes")
        rows = config.max_requests + config.prefill_chunk
        self._make: MakeRunner = lambda tensors: choice.make(model, tensors, self._cache, rows, self.context)
        self._prober = Prober(model, shape, limit=rows, context=self.context, tolerance=config.probe_tolerance)
        max_blocks = shape.blocks(self.context)
        idle = Activity(ActivityLabel.IDLE, cause=STARTING)
        self.slots = [
            EngineSlot(
                index,
                DecodeBatch(config.max_requests, config.prefill_chunk, max_blocks, config.stream_every, config.stretch),
                TimeAccount(clock(), idle),
            )
            for index in range(config.slots)
        ]
        self._reports = Reports(instance)
        self._scheduler = Scheduler(self._cache, [slot.batch for slot in self.slots], config, self._reports.chunk)
        self._executor = StepExecutor(self._scheduler, config)
        self._segments = SegmentPool()
        self._sequences: dict[TrajectoryId, Sequence] = {}
        self._arrivals = 0

    # Slots.

    def serving(self, slot: int) -> Version | None:
        """Return the version that a slot serves, or None."""
        return self._slot(slot).version

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Begin to load a version; a later step reports `SlotLoaded` or `SlotLoadFailed`."""
        target = self._slot(slot)
        if target.loading is not None:
            raise SlotError(f"slot {slot} is already loading version {target.loading.version}")
        if not in_flight:
            self.unload(slot)
        alone = len(self.slots) == 1 and not self._sequences
        if alone:
            target.account.switch(self._clock(), Activity(ActivityLabel.LOAD, version))
        target.loading = Loading(
            SlotId(self.instance, slot),
            version,
            self._weights,
            self._make,
            self._prober,
            now=alone,
            # Beside running requests the probe uses one thread, so that it hardly slows them down.
            threads=1 if self._sequences else self.threads,
        )

    def unload(self, slot: int) -> None:
        """Stop serving from a slot that has no requests, and release its weights."""
        target = self._slot(slot)
        if any(sequence.slot == slot for sequence in self._sequences.values()):
            raise SlotError(f"slot {slot} still has requests of version {target.version}")
        target.version, target.runner, target.fingerprint = None, None, ""

    def wait_for_loads(self) -> None:
        """Wait until every load that has begun is done."""
        for slot in self.slots:
            if slot.loading is not None:
                slot.loading.wait()
        self._finish_loads()

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Account the idle time of a slot to this cause until the slot has work."""
        target = self._slot(slot)
        target.idle = cause
        if not len(target.batch):
            target.account.switch(self._clock(), Activity(ActivityLabel.IDLE, cause=cause))

    # Requests.

    def submit(self, request: Request, slot: int | None = None) -> None:
        """Accept a request, or refuse it with a typed error."""
        index = self._serving(request.version) if slot is None else slot
        target = self._slot(index)
        if target.version != request.version:
            raise VersionError(f"slot {index} serves version {target.version}, not {request.version}")
        self._check(request)
        limit = request.length_limit(self.context)
        self._sequences[request.trajectory] = sequence = Sequence(
            request, index, self._arrivals, limit, target.fingerprint
        )
        self._arrivals += 1
        self._scheduler.enqueue(sequence)

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, and return whether it was here."""
        sequence = self._sequences.get(trajectory)
        if sequence is None or sequence.request.attempt != attempt:
            return False
        self._scheduler.flush(sequence)
        self._scheduler.drop(sequence)
        del self._sequences[trajectory]
        return True

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Return whether this attempt is here, running, waiting or parked."""
        sequence = self._sequences.get(trajectory)
        return sequence is not None and sequence.request.attempt == attempt

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Remove requests and return them with their KV and tokens; what they have sampled is reported here."""
        start = self._clock()
        leaving = [self._sequence(trajectory) for trajectory in trajectories]
        for sequence in leaving:
            self._scheduler.flush(sequence)
        bundle = pack(leaving, self._scheduler.parked, self._cache, self._segments if shared else None)
        for sequence in leaving:
            self._scheduler.drop(sequence)
            del self._sequences[sequence.request.trajectory]
        self._scheduler.stats.exported += len(leaving)
        self._account_migration({sequence.slot for sequence in leaving}, start)
        return bundle

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Resume the requests of a bundle without prefilling a token again; return those that arrived, and errors."""
        start = self._clock()
        target = self._slot(slot)
        arrived, errors = [], []
        for frame in bundle.frames():
            try:
                sequence = unpack(frame, target, self._cache, self._arrivals, self.context)
                self._check_free(sequence.request)
            except (BundleError, RequestError) as error:
                errors.append(error if isinstance(error, BundleError) else BundleError(str(error)))
                continue
            sequence.keep_alive = bundle
            self._sequences[sequence.request.trajectory] = sequence
            self._arrivals += 1
            if frame.moved is not None and frame.moved.parked:
                self._scheduler.park(sequence)
            elif sequence.host is None:
                self._scheduler.enqueue(sequence)
            else:
                self._scheduler.adopt(sequence)
            arrived.append(sequence.request.trajectory)
        bundle.release()
        self._scheduler.stats.imported += len(arrived)
        self._account_migration({slot}, start)
        return tuple(arrived), tuple(errors)

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """Append the environment's tokens to a parked request and resume it; only these tokens are prefilled."""
        sequence = self._parked(trajectory, attempt)
        added = np.asarray(list(tokens), dtype=np.int64)
        if ((added < 0) | (added >= self.vocab)).any():
            raise PromptError(f"the environment of trajectory {trajectory} returned an unknown token id")
        end = sequence.length + len(added)
        if end >= sequence.limit:
            raise PromptError(f"trajectory {trajectory} would have {end} tokens, and {sequence.limit} are allowed")
        sequence.tokens[sequence.length : end] = added
        sequence.length = end
        sequence.reported += len(added)
        sequence.turn_start = sequence.response_length
        self._scheduler.wake(sequence)

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """Report a parked request as generated: its last turn is over."""
        sequence = self._parked(trajectory, attempt)
        self._scheduler.drop(sequence)
        del self._sequences[trajectory]
        self._reports.generated(sequence, self.kv_tokens)

    # State.

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        unparked = len(self._sequences) > len(self._scheduler.parked)
        loading = any(slot.loading for slot in self.slots)
        return unparked or loading or bool(self._reports)

    @property
    def stats(self) -> Stats:
        """Counters since the engine began."""
        return self._scheduler.stats

    @property
    def accounts(self) -> list[TimeAccount]:
        """Where the time of each slot went: every slot decodes its own batch."""
        return [slot.account for slot in self.slots]

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV blocks in use."""
        return self._scheduler.kv_tokens

    @property
    def running(self) -> int:
        """Number of requests in the batches; the others wait, are swapped or parked."""
        return self._scheduler.running

    def spec(self) -> InstanceSpec:
        """Return the capacity of this instance."""
        return InstanceSpec(
            instance=self.instance,
            slots=len(self.slots),
            max_requests=self.config.max_requests,
            kv_tokens=self._cache.count * self.config.block_size,
        )

    def progress(self) -> Progress:
        """Return the heartbeat: KV in use and the length of each response."""
        tokens = {}
        for trajectory, sequence in self._sequences.items():
            pending = int(self.slots[sequence.slot].batch.fill[sequence.row]) if sequence.row >= 0 else 0
            tokens[trajectory] = sequence.response_length + pending
        return Progress(instance=self.instance, kv_tokens=self.kv_tokens, tokens=tokens)

    def check(self) -> None:
        """Assert that every block, host byte and row is accounted for, and that an empty engine holds no block."""
        self._scheduler.check()
        if not self._sequences:
            pool = self._scheduler.pool
            assert pool.free == pool.count, f"{pool.count - pool.free} blocks are held while the engine is idle"

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads from the next step on."""
        if threads < 1:
            raise RequestError(f"an engine needs at least one thread, not {threads}")
        self.threads = threads
        torch.set_num_threads(threads)

    # One step.

    def step(self) -> StepOutput:
        """Compute a decode step of every slot and a chunk of prefill, or several decode steps; return the reports."""
        self._finish_loads()
        start = self._clock()
        chunks = self._scheduler.plan()
        work = {}
        busy = [slot for slot in self.slots if slot.batch.decoding or chunks[slot.index]]
        for slot, done in self._executor.passes(busy, chunks, self.threads):
            work[slot.index] = done.work
            self._inspect(slot, done.rows, done.ended)
        self.stats.together = max(self.stats.together, len(work))
        end = self._clock()
        for slot in self.slots:
            account_step(slot, work.get(slot.index), start, end, others=bool(work))
        if self._scheduler.preempted:
            self._scheduler.preempted = False
            self._reports.event(KvPressure(instance=self.instance, kv_tokens=self.kv_tokens))
        return self.drain()

    def drain(self) -> StepOutput:
        """Return what there is to report without computing."""
        return self._reports.take()

    def _inspect(self, slot: EngineSlot, rows: Any, ended: Any) -> None:
        """Flush rows that are due for a report, and finish those that have ended."""
        batch = slot.batch
        due = [(batch.sequences[row], bool(over)) for row, over in zip(rows, ended, strict=True)]
        for sequence, over in due:
            if not over and not (batch.watched[sequence.row] and self._contains_stop(sequence, batch)):
                if batch.fill[sequence.row] >= batch.every:
                    self._scheduler.flush(sequence)
                continue
            self._finish(sequence, batch, over)

    def _finish(self, sequence: Sequence, batch: DecodeBatch, by_id_or_length: bool) -> None:
        request = sequence.request
        last = int(batch.token[sequence.row])
        failed = last < 0
        if failed:
            batch.fill[sequence.row] -= 1  # the last draw gave no token
        self._scheduler.flush(sequence)
        if failed:
            reason = FinishReason.FAILED
        elif not by_id_or_length or last in request.sampling.stop_ids:
            reason = FinishReason.STOP
        else:
            full = sequence.response_length >= request.sampling.max_tokens
            reason = FinishReason.LENGTH if full else FinishReason.CONTEXT
        parks = request.parks and reason is FinishReason.STOP and sequence.length + 1 < sequence.limit
        if parks:
            self._scheduler.park(sequence)
        else:
            self._scheduler.drop(sequence)
            del self._sequences[request.trajectory]
        self._reports.finished(sequence, reason)
        if failed:
            self._reports.failed(sequence, "the model's logits are not finite numbers")
        elif parks:
            self._reports.parked(sequence, self.kv_tokens)
        else:
            self._reports.generated(sequence, self.kv_tokens)

    def _contains_stop(self, sequence: Sequence, batch: DecodeBatch) -> bool:
        """Return whether the end of the current turn contains one of the stop strings."""
        stops = sequence.request.sampling.stop
        pending = batch.history[sequence.row, : batch.fill[sequence.row]]
        tail = np.concatenate([sequence.response[sequence.turn_start :], pending])[-stop_window(stops) :]
        return contains_stop(tail.tolist(), stops, self._tokenizer)

    # Loads.

    def _finish_loads(self) -> None:
        for slot in self.slots:
            loading = slot.loading
            if loading is None or not loading.done:
                continue
            slot.loading = None
            where = SlotId(self.instance, slot.index)
            if loading.runner is None:
                differs = isinstance(loading.error, ProbeError)
                failed = SlotLoadFailed(slot=where, version=loading.version, reason=str(loading.error), differs=differs)
                self._reports.event(failed)
                continue
            self._serve(slot, loading)
            loaded = SlotLoaded(
                slot=where, version=loading.version, fingerprint=loading.fingerprint, probe=loading.probe
            )
            self._reports.event(loaded)

    def _serve(self, slot: EngineSlot, loading: Loading) -> None:
        """Serve the loaded version from now on; requests in flight compute their KV again under it."""
        staying = [sequence for sequence in self._sequences.values() if sequence.slot == slot.index]
        parked = [sequence for sequence in staying if sequence in self._scheduler.parked]
        for sequence in staying:
            self._scheduler.flush(sequence)
            self._scheduler.drop(sequence)
        slot.version, slot.fingerprint, slot.runner = loading.version, loading.fingerprint, loading.runner
        self._scheduler.loads[slot.index] += 1
        for sequence in staying:
            sequence.forget_kv()
            sequence.version, sequence.fingerprint = loading.version, loading.fingerprint
            if sequence in parked:
                self._scheduler.park(sequence)
            else:
                self._scheduler.enqueue(sequence)

    def _account_migration(self, slots: set[int], start: Nanoseconds) -> None:
        end = self._clock()
        for index in slots:
            account_migration(self.slots[index], start, end)

    # Lookups and checks.

    def _check(self, request: Request) -> None:
        self._check_free(request)
        check_request(request, vocab=self.vocab, context=self.context, tokenizer=self._tokenizer)
        limit = request.length_limit(self.context)
        blocks = self._cache.shape.blocks(limit)
        if blocks > self._cache.count:
            raise PromptError(
                f"trajectory {request.trajectory} may grow to {limit} tokens, {blocks} blocks of KV, but kv_bytes "
                f"allows {self._cache.count}; raise kv_bytes or lower max_tokens"
            )

    def _check_free(self, request: Request) -> None:
        if request.trajectory in self._sequences:
            raise RequestError(f"trajectory {request.trajectory} is already here")

    def _slot(self, index: int) -> EngineSlot:
        if not 0 <= index < len(self.slots):
            raise SlotError(f"there is no slot {index}: the engine has {len(self.slots)}")
        return self.slots[index]

    def _serving(self, version: Version) -> int:
        for slot in self.slots:
            if slot.version == version:
                return slot.index
        serving = ", ".join(str(slot.version) for slot in self.slots if slot.version is not None) or "none"
        raise VersionError(f"no slot serves version {version}; the versions served are: {serving}")

    def _parked(self, trajectory: TrajectoryId, attempt: Attempt) -> Sequence:
        sequence = self._sequences.get(trajectory)
        if sequence is None or sequence.request.attempt != attempt or sequence not in self._scheduler.parked:
            raise RequestError(f"trajectory {trajectory}, attempt {attempt}, is not parked here")
        return sequence

    def _sequence(self, trajectory: TrajectoryId) -> Sequence:
        sequence = self._sequences.get(trajectory)
        if sequence is None:
            raise RequestError(f"trajectory {trajectory} is not here")
        return sequence
