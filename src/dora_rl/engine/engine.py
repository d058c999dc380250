"""The built-in rollout engine: continuous batching over slots of versioned weights, in one thread.

    submit, load, abort, export, import_      between steps
    step()                                    plan -> a forward pass for each busy slot -> sample -> report

Invariants:
- all tokens of a request come from the version in its slot; each is reported once, in order, with that version
  (mode `partial` changes the version under a running request, and then reports say so);
- what a request says does not depend on what else runs: its random numbers are keyed by (seed, trajectory, position),
  and with the compiled kernels its logits are the same to the last bit in any batch;
- a request that can't be served is refused with a typed error, and no other notices;
- when nothing is running, waiting or swapped, every block is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.errors import (
    BundleError,
    MemoryCapError,
    ProbeError,
    PromptError,
    RequestError,
    SlotError,
    VersionError,
)
from dora_rl.core.events import (
    AnyEvent,
    Generated,
    KvPressure,
    Parked,
    Progress,
    SlotLoaded,
    SlotLoadFailed,
    TrajectoryFailed,
)
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Attempt, InstanceId, InstanceSpec, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.engine.batch import DecodeBatch
from dora_rl.engine.kernel_choice import choose
from dora_rl.engine.kv import KvCache
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.kv_transfer.pack import pack, unpack
from dora_rl.engine.kv_transfer.shared_memory import SegmentPool
from dora_rl.engine.probe import Prober
from dora_rl.engine.request_checks import check_request, reach, says_stop
from dora_rl.engine.requests import Finished, FinishReason, Request, StepOutput
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import Sequence
from dora_rl.engine.slots import STARTING, EngineSlot, Loading
from dora_rl.engine.stats import Stats
from dora_rl.engine.step_execution import StepExecutor, Work
from dora_rl.models.text import model_context

if TYPE_CHECKING:
    from dora_rl.core.interfaces import WeightSource
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.runner import MakeRunner

Clock = Callable[[], Nanoseconds]
_SPARE = IdleCause(reason=IdleReason.SPARE)
_NO_PROMPTS = IdleCause(reason=IdleReason.NO_PROMPTS)


class Engine:
    """One rollout engine. Not thread-safe: one thread calls it."""

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
        way = choose(model, config, self.context)
        shape, self.kernels = way.shape, way.name
        self._cache = KvCache(shape, config.kv_bytes, model.device)
        if self._cache.count < 2:
            raise MemoryCapError(f"kv_bytes is {config.kv_bytes:,}; two blocks take {2 * shape.block_bytes:,} bytes")
        rows = config.max_requests + config.prefill_chunk
        self._make: MakeRunner = lambda tensors: way.make(model, tensors, self._cache, rows, self.context)
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
        self._scheduler = Scheduler(self._cache, [slot.batch for slot in self.slots], config, self._report)
        self._computing = StepExecutor(self._scheduler, config)
        self._segments = SegmentPool()
        self._sequences: dict[TrajectoryId, Sequence] = {}
        self._arrivals = 0
        self._chunks: list[TokenChunk] = []
        self._finished: list[Finished] = []
        self._events: list[AnyEvent] = []

    # What others ask for between steps.

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Begin to load a version; a later step says `SlotLoaded` or `SlotLoadFailed`."""
        place = self._slot(slot)
        if place.loading is not None:
            raise SlotError(f"slot {slot} is already loading version {place.loading.version}")
        if not in_flight:
            self.unload(slot)
        alone = len(self.slots) == 1 and not self._sequences
        if alone:
            place.account.switch(self._clock(), Activity(ActivityLabel.LOAD, version))
        place.loading = Loading(
            SlotId(self.instance, slot),
            version,
            self._weights,
            self._make,
            self._prober,
            now=alone,
            # Beside running requests the probe is content with one thread, so that it hardly slows them.
            threads=1 if self._sequences else self.threads,
        )

    def unload(self, slot: int) -> None:
        """The slot serves nothing from now on and lets go of its weights."""
        place = self._slot(slot)
        if any(sequence.slot == slot for sequence in self._sequences.values()):
            raise SlotError(f"slot {slot} still has requests of version {place.version}")
        place.version, place.runner, place.fingerprint = None, None, ""

    def wait_for_loads(self) -> None:
        """Until every load that has begun is done and its slot serves."""
        for slot in self.slots:
            if slot.loading is not None:
                slot.loading.wait()
        self._finish_loads()

    def submit(self, request: Request, slot: int | None = None) -> None:
        """Take a request in, or refuse it with a typed error."""
        index = self._serving(request.version) if slot is None else slot
        place = self._slot(index)
        if place.version != request.version:
            raise VersionError(f"slot {index} serves version {place.version}, not {request.version}")
        self._check(request)
        limit = request.length_limit(self.context)
        self._enter(Sequence(request, index, self._arrivals, limit, place.fingerprint))

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, should it be here."""
        sequence = self._sequences.get(trajectory)
        if sequence is None or sequence.request.attempt != attempt:
            return False
        self._scheduler.flush(sequence)
        self._scheduler.drop(sequence)
        del self._sequences[trajectory]
        return True

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """This attempt is here, running or waiting."""
        sequence = self._sequences.get(trajectory)
        return sequence is not None and sequence.request.attempt == attempt

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Requests leave with their KV, sampler state and tokens. What they sampled so far is reported here first."""
        start = self._clock()
        leaving = [self._sequence(trajectory) for trajectory in trajectories]
        for sequence in leaving:
            self._scheduler.flush(sequence)
        bundle = pack(leaving, self._scheduler.parked, self._cache, self._segments if shared else None)
        for sequence in leaving:
            self._scheduler.drop(sequence)
            del self._sequences[sequence.request.trajectory]
        self._scheduler.stats.exported += len(leaving)
        self._account_move({sequence.slot for sequence in leaving}, start)
        return bundle

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Requests go on here, with not one token prefilled again: who arrived, and what was wrong with the rest."""
        start = self._clock()
        place = self._slot(slot)
        arrived, errors = [], []
        for frame in bundle.frames():
            try:
                sequence = unpack(frame, place, self._cache, self._arrivals, self.context)
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
        bundle.taken()
        self._scheduler.stats.imported += len(arrived)
        self._account_move({slot}, start)
        return tuple(arrived), tuple(errors)

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """A parked request goes on after what its environment said; only these tokens are prefilled."""
        sequence = self._parked(trajectory, attempt)
        said = np.asarray(list(tokens), dtype=np.int64)
        if ((said < 0) | (said >= self.vocab)).any():
            raise PromptError(f"what the environment of trajectory {trajectory} said has an unknown token id")
        end = sequence.length + len(said)
        if end >= sequence.limit:
            raise PromptError(f"trajectory {trajectory} would have {end} tokens, and {sequence.limit} are allowed")
        sequence.tokens[sequence.length : end] = said
        sequence.length = end
        sequence.reported += len(said)
        self._scheduler.wake(sequence)

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """A parked request has had its last turn; it is reported as generated."""
        sequence = self._parked(trajectory, attempt)
        self._scheduler.drop(sequence)
        del self._sequences[trajectory]
        self._generated(sequence)

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next step on."""
        if threads < 1:
            raise RequestError(f"an engine needs at least one thread, not {threads}")
        self.threads = threads
        torch.set_num_threads(threads)

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Why a slot has nothing to do; holds until it has."""
        place = self._slot(slot)
        place.idle = cause
        if not len(place.batch):
            place.account.switch(self._clock(), Activity(ActivityLabel.IDLE, cause=cause))

    # What the engine is.

    @property
    def busy(self) -> bool:
        """There is something to do in a step."""
        moving_on = len(self._sequences) > len(self._scheduler.parked)
        loading = any(slot.loading for slot in self.slots)
        return moving_on or loading or bool(self._chunks or self._finished or self._events)

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    def accounts(self) -> list[TimeAccount]:
        """Where each slot's time went: every slot decodes a batch of its own."""
        return [slot.account for slot in self.slots]

    def serving(self, slot: int) -> Version | None:
        """The version in a slot."""
        return self._slot(slot).version

    @property
    def kv_tokens(self) -> int:
        """Tokens' worth of KV blocks in use."""
        return self._scheduler.kv_tokens

    @property
    def running(self) -> int:
        """Requests in the batches now; the others wait or are swapped."""
        return self._scheduler.running

    def spec(self) -> InstanceSpec:
        """What this instance can do."""
        return InstanceSpec(
            instance=self.instance,
            slots=len(self.slots),
            max_requests=self.config.max_requests,
            kv_tokens=self._cache.count * self.config.block_size,
        )

    def progress(self) -> Progress:
        """Heartbeat: load, and how far each request is."""
        tokens = {}
        for trajectory, sequence in self._sequences.items():
            pending = int(self.slots[sequence.slot].batch.fill[sequence.row]) if sequence.row >= 0 else 0
            tokens[trajectory] = sequence.length - sequence.prompt_length + pending
        return Progress(instance=self.instance, kv_tokens=self.kv_tokens, tokens=tokens)

    def check(self) -> None:
        """Every block, host byte and row is accounted for; all blocks are free when nothing is here."""
        self._scheduler.check()
        if not self._sequences:
            pool = self._scheduler.pool
            assert pool.free == pool.count, f"{pool.count - pool.free} blocks are held while the engine is idle"

    # One step.

    def step(self) -> StepOutput:
        """One decode step for every slot, with a chunk of prefill, or a few without; gives what there is to report."""
        self._finish_loads()
        start = self._clock()
        chunks = self._scheduler.plan()
        work = {}
        busy = [slot for slot in self.slots if slot.batch.decoding or chunks[slot.index]]
        for slot, done in self._computing.passes(busy, chunks, self.threads):
            work[slot.index] = done.work
            self._look(slot, done.rows, done.ended)
        self.stats.together = max(self.stats.together, len(work))
        end = self._clock()
        for slot in self.slots:
            self._account(slot, work.get(slot.index), start, end, bool(work))
        if self._scheduler.pressed:
            self._scheduler.pressed = False
            self._events.append(KvPressure(instance=self.instance, kv_tokens=self.kv_tokens))
        return self.drain()

    def drain(self) -> StepOutput:
        """What is waiting to be reported."""
        output = StepOutput(chunks=tuple(self._chunks), finished=tuple(self._finished), events=tuple(self._events))
        self._chunks, self._finished, self._events = [], [], []
        return output

    def _look(self, slot: EngineSlot, rows: Any, ended: Any) -> None:
        """Flush rows that are due; let go of those that have ended."""
        batch = slot.batch
        due = [(batch.sequences[row], bool(over)) for row, over in zip(rows, ended, strict=True)]
        for sequence, over in due:
            if not over and not (batch.watched[sequence.row] and self._says_stop(sequence, batch)):
                if batch.fill[sequence.row] >= batch.every:
                    self._scheduler.flush(sequence)
                continue
            self._end(sequence, batch, over)

    def _end(self, sequence: Sequence, batch: DecodeBatch, by_id_or_length: bool) -> None:
        request = sequence.request
        last = int(batch.token[sequence.row])
        failed = last < 0
        if failed:
            batch.fill[sequence.row] -= 1  # no token came of the last draw
        self._scheduler.flush(sequence)
        count = sequence.length - sequence.prompt_length
        if failed:
            reason = FinishReason.FAILED
        elif not by_id_or_length or last in request.sampling.stop_ids:
            reason = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if count >= request.sampling.max_tokens else FinishReason.CONTEXT
        parks = request.parks and reason is FinishReason.STOP and sequence.length + 1 < sequence.limit
        if parks:
            self._scheduler.park(sequence)
        else:
            self._scheduler.drop(sequence)
            del self._sequences[request.trajectory]
        self._finished.append(Finished(**self._stamp(sequence), reason=reason, tokens=count))
        if failed:
            why = "the model's logits are not finite numbers"
            self._events.append(TrajectoryFailed(trajectory=request.trajectory, reason=why))
        elif parks:
            parked = Parked(trajectory=request.trajectory, attempt=request.attempt, kv_tokens=self.kv_tokens)
            self._events.append(parked)
        else:
            self._generated(sequence)

    def _generated(self, sequence: Sequence) -> None:
        count = sequence.length - sequence.prompt_length
        event = Generated(**self._stamp(sequence), instance=self.instance, tokens=count, kv_tokens=self.kv_tokens)
        self._events.append(event)

    def _stamp(self, sequence: Sequence) -> dict[str, Any]:
        """Who was served, and from what."""
        return {
            "trajectory": sequence.request.trajectory,
            "attempt": sequence.request.attempt,
            "version": sequence.version,
            "fingerprint": sequence.fingerprint,
        }

    def _says_stop(self, sequence: Sequence, batch: DecodeBatch) -> bool:
        """The response's end contains one of the stop strings."""
        stops = sequence.request.sampling.stop
        pending = batch.history[sequence.row, : batch.fill[sequence.row]]
        tail = np.concatenate([sequence.response, pending])[-reach(stops) :]
        return says_stop(tail.tolist(), stops, self._tokenizer)

    def _report(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)

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
                self._events.append(failed)
                continue
            self._put(slot, loading)
            loaded = SlotLoaded(
                slot=where, version=loading.version, fingerprint=loading.fingerprint, probe=loading.probe
            )
            self._events.append(loaded)

    def _put(self, slot: EngineSlot, loading: Loading) -> None:
        """From here on the slot serves the loaded version; requests in flight compute their KV again under it."""
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

    def _account(self, slot: EngineSlot, work: Work | None, start: Nanoseconds, end: Nanoseconds, others: bool) -> None:
        """The step's time, split by tokens where a slot did several things.

        A slot that idles does so for the cause that was told, but for the time in which others of its instance compute.
        """
        account = slot.account
        if work is None:
            if slot.loading is not None:
                account.switch(start, Activity(ActivityLabel.LOAD, slot.loading.version))
            elif others:
                account.switch(start, Activity(ActivityLabel.IDLE, cause=_SPARE))
                account.switch(end, Activity(ActivityLabel.IDLE, cause=slot.idle))
            elif account.current.label is not ActivityLabel.IDLE:
                account.switch(start, Activity(ActivityLabel.IDLE, cause=slot.idle))
            account.settle(end)
            return
        slot.idle = _NO_PROMPTS
        total = sum(work)
        now = start
        parts = (
            (ActivityLabel.REPREFILL, work.reprefilled),
            (ActivityLabel.PREFILL, work.prefilled),
            (ActivityLabel.DECODE, work.decoded),
        )
        for label, tokens in parts:
            if tokens:
                account.switch(now, Activity(label, slot.version))
                now += (end - start) * tokens // total
        account.settle(end)

    def _account_move(self, slots: set[int], start: Nanoseconds) -> None:
        """The time since `start` went into moving requests of these slots."""
        end = self._clock()
        for index in slots:
            account = self.slots[index].account
            before = account.current
            account.switch(start, Activity(ActivityLabel.MIGRATE, self.slots[index].version))
            account.switch(end, before)

    # Checks.

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

    def _enter(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.trajectory] = sequence
        self._arrivals += 1
        self._scheduler.enqueue(sequence)

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
